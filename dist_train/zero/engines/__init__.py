"""Other people's engines behind the protocol of ours (`zero.protocol.Engine`): the same recipe, data and checkpoints."""
