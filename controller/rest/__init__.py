"""REST, Prometheus and the dashboard, served by every controller."""
