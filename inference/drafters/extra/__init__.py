"""Drafters that pay on few machines; imported only when they are asked for."""
