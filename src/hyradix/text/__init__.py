"""Text to ids and back. Read ``tokenizer.py``, ``chat_template.py``, ``output_stream.py``."""
