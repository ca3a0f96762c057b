"""Token ids in, token ids out. No text and no asyncio."""
