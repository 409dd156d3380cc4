"""The index: who holds what, as a hint. One port (`port.py`), two implementations that pass one test suite."""
