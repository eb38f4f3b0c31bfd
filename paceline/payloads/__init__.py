"""Groups of completions: their checks and metadata, and the store of their payloads, which workers
write, policy ranks read and controllers tidy."""
