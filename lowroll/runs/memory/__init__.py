"""The memory plan of a run, by arithmetic on its settings and model shapes before anything is
loaded (`plan`), and settings that would fit where it does not (`fit`).
"""
