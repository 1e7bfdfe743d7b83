"""The plan of what a run will hold in memory, by arithmetic on its settings and the shapes of its
models, before anything is loaded (`plan`), and the settings that would fit where it does not
(`fit`)."""
