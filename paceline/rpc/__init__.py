"""The control plane's gRPC client, worker session, authentication, addresses and limits."""
