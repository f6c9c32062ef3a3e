"""The step under faults, load and hostile input: what docs/reliability.md promises.

Most of it happens in processes of their own, which may crash, hang or be killed without harm to the rest.
"""
