"""An engine behind HTTP: the OpenAI-compatible server of `lowroll serve`.

One thread owns the engine (`loop`); everything else runs in one asyncio event loop and talks to it
through tickets and calls.
"""
