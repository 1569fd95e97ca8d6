"""Many workers in one process under a virtual clock: the algorithms of `gasloc`, with no network and no waiting."""
