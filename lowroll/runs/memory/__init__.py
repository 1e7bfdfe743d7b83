"""The memory plan of a run before anything is loaded (`plan`), and settings that would fit
(`fit`)."""
