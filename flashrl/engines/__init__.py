"""One small package an engine; each adapter is found by its entry point."""
