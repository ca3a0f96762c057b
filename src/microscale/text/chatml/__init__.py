"""ChatML as Qwen 3 uses it: turns between ``<|im_start|>`` and ``<|im_end|>``, reasoning, and calls in JSON."""
