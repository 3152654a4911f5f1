"""Who may connect to a service, and what may each ask for: keys of CURVE, libzmq's own encryption; without them this user.

    rollout keys init, add, revoke ──→ the service's file ──→ KeyRing ──→ Door: whom libzmq lets in
                                  └──→ a client's connection file ──→ ClientEnd

`files` are the two files, `ring` the keys as a running service sees them, `door` answers libzmq, `curve` sets sockets up.
`cookie` is what a service without keys has: one secret, which its user's clients find in a file.
"""
