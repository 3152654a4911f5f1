"""Who may connect to a service, and what may each ask for: keys of CURVE, libzmq's own encryption.

    rollout keys init, add, revoke ──→ the service's file ──→ KeyRing ──→ Door: whom libzmq lets in
                                  └──→ a client's connection file ──→ ClientEnd

`files` are the two files, `ring` the keys as a running service sees them, `door` answers libzmq, `curve` sets sockets up.
"""
