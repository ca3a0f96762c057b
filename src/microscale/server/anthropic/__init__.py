"""Anthropic's Messages API: requests are converted to chat fields, replies are blocks and their events.

Thinking and effort. The models have three levels of effort, and ``thinking.effort_of`` chooses one:

    thinking disabled                          low, and no reasoning is returned
    output_config.effort                       low, medium, high; xhigh and max are high
    thinking enabled, budget below 4096        low
    thinking enabled, budget below 16384       medium
    thinking enabled, budget from 16384 on     high
    anything else                              medium, the model's own default

The first line that applies decides. Reasoning is returned in ``thinking`` blocks only if ``thinking`` requests it,
since other programs read ``content[0].text``. With ``display: omitted`` the blocks are empty and their signature
carries the text, so that the model still has it when the client sends the block back.

Tool input that is not a JSON object is returned as ``{"INVALID_JSON": "<the text>"}``, and ``flaws`` names it.
"""
