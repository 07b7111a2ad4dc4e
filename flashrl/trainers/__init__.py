"""One small package a trainer; each adapter is found by its entry point."""
