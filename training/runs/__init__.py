"""The loops: of heads, alone or with an adapter, and of draft models; resumed and recorded."""
