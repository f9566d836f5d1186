"""Draft tokens: who proposes them, how they are verified, what of the state is kept.

Read ``proposer.py`` first, then ``drafts.py``.
"""
