"""What the server reports about itself: Prometheus metrics, and the routes /health, /load, /version, /plan, /metrics."""
