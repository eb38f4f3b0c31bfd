"""REST, server-sent events, Prometheus and the dashboard, served by every controller."""
