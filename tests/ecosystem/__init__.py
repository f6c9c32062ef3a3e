"""roundpipe_go inside torch's own tools, trainers and distributed engines: the bits of torch.optim in each.

A package, so that its modules may be called as they like and spawned processes find them.
"""
