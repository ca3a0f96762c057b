"""What develops Microscale and serves no model: proofs, tuning, kernel benchmarks, predictions, quality, reports."""
