"""Who exchanges with whom, and the rounds between them.

Nothing is imported here: the launcher of a pod uses `kube` and has no need of torch.
"""
