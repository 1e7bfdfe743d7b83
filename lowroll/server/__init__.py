"""An engine behind HTTP: the OpenAI-compatible server of `lowroll serve`.

One thread owns the engine (`engine_loop`); everything else runs in one asyncio event loop.
"""
