"""An engine behind HTTP, for `lowroll serve` (docs/architecture.md)."""
