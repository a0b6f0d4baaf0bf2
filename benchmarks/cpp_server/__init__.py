"""llama.cpp's own server tests, run against localllm.

Copy llama.cpp's tools/server/tests, and change three things in the copy, because the models are tiny
and random: `match_regex` in utils.py returns True, conftest.py does not load presets, and asserts of
the prompt's token count are dropped:

    sed -i -E 's/^( *)assert .*== n_prompt$/\\1assert True/' unit/*.py

Models: main.gguf (endless_model.py), bert.gguf and
rerank.gguf (tiny_bert.write_bert, pooling 1 and 4), vision/vision.gguf and its projector as
vision/mmproj.gguf (tiny_vision, gemma3). Then run, with the variables of start.py:

    LLAMA_SERVER_BIN_PATH=…/benchmarks/cpp_server/start.py PORT=18500 pytest --timeout 180 unit

Of the 199 tests that pass with llama-server, 178 passed in one run on 2026-11-30. With a random model
that may end its answers, 167 to 174 passed.

known_differences.txt has the tests that pass with llama-server on these models and not here, each
with its reason.
"""
