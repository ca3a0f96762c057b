"""What the server reports about itself: /health, /load, /version, /plan, and /metrics for Prometheus."""
