#!/usr/bin/env bash
# A running server through curl alone.
#
#     hyradix serve                 # in one terminal
#     bash examples/raw_http.sh     # in another
set -euo pipefail
URL=${1:-http://127.0.0.1:8000}

echo "== what is served"
curl -sS --fail "$URL/v1/models"; echo

echo "== continue a text"
curl -sS --fail "$URL/v1/completions" -H 'Content-Type: application/json' \
  -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'; echo

echo "== chat, streamed"
curl -sS --fail -N "$URL/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0,
       "stream": true, "stream_options": {"include_usage": true}}'

echo "== tokens and back"
curl -sS --fail "$URL/tokenize" -H 'Content-Type: application/json' -d '{"prompt": "Hello!"}'; echo
curl -sS --fail "$URL/detokenize" -H 'Content-Type: application/json' -d '{"tokens": [704, 16]}'; echo

echo "== an error keeps OpenAI's shape"
curl -sS "$URL/v1/completions" -H 'Content-Type: application/json' \
  -d '{"prompt": "a", "temprature": 1}'; echo

echo "== health, and a few of the metrics"
curl -sS --fail "$URL/health"; echo
curl -sS --fail "$URL/metrics" | grep -E '^hyradix_(cached|prompt)_tokens_total'
