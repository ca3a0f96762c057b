"""ChatML, as Qwen 3 speaks it: turns between ``<|im_start|>`` and ``<|im_end|>``, thoughts, and calls in JSON."""
