"""Authentication and roles: CURVE keys (libzmq's encryption), or without keys a secret of the service's user.

    rollout keys init, add, revoke ──→ the service's file ──→ KeyRing ──→ KeyAuthenticator: which connections libzmq accepts
                                  └──→ a client's connection file ──→ ClientEnd

`files` reads and writes both files, `ring` has the keys of a running service, `authenticator` answers libzmq, `curve`
configures sockets, `cookie` is the secret of a service without keys.
"""
