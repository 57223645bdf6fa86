"""Writes tests/data/chats.json: conversations as the library transformers renders and encodes them.

    pip install transformers tokenizers sentencepiece protobuf
    python tools/make_chat_fixtures.py tests/data/chats.json

The tokenizers and templates are those of tests/chat_tokenizers.py.
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import chat_tokenizers  # noqa: E402

QUESTION = {"role": "user", "content": "Why does the cat sit on the mat?"}
ANSWER = {"role": "assistant", "content": " Because it is warm,\n\n  and dry – très sec.\n"}
CHATS = [
    [QUESTION],
    [QUESTION, ANSWER],
    [QUESTION, ANSWER, {"role": "user", "content": "<b> & 'c' {{ d }}\t\r\n"}],
    [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER, QUESTION],
]


def main(output: str) -> None:
    found = []
    for name in chat_tokenizers.TEMPLATES:
        place = chat_tokenizers.write(name, Path(tempfile.mkdtemp())).parent
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        for messages in CHATS:
            for more in (False, True):
                how = {"add_generation_prompt": more}
                try:
                    text = tokenizer.apply_chat_template(messages, tokenize=False, **how)
                except Exception:
                    text, ids = None, None
                else:
                    ids = tokenizer.apply_chat_template(messages, return_dict=False, **how)
                found.append({"name": name, "messages": messages, **how, "text": text, "ids": ids})
    lines = ",\n".join(json.dumps(case) for case in found)
    Path(output).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
