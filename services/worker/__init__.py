"""What prefill and decode workers share: settings, the bridge to the engine thread, start-up, internal HTTP."""
