"""A decoder of sliding-window, recurrent and memory layers in PyTorch.

The model is one that brt trained, or a pretrained decoder with a bounded window. A token attends to
a window of the last tokens and, as far as the model has them, to the first tokens of the text
(sinks), to recurrent state vectors (Block-Recurrent Transformers, Hutchins et al. 2022), which are
updated after each block of tokens, and to other memories. The carried state has a constant size:

    model = load("DIRECTORY")  # needs torch and safetensors; with transformers instead:
    model = AutoModelForCausalLM.from_pretrained("DIRECTORY", trust_remote_code=True)
    logits, state = model(ids)  # ids [B, T], any T; begin a text with config.bos_token_id
    logits, state = model(more, state)  # continues the text
    ids = model.generate(ids, max_new_tokens=200, do_sample=True, temperature=0.8)

The file needs decoder_brt.py and layers_brt.py in its directory. Letters in shapes: B texts, T
tokens, V vocabulary.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

try:
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput
except ImportError:  # Without transformers, models are loaded by the function `load`.
    PretrainedConfig = PreTrainedModel = None

# A file that was imported by its path belongs to no package. Its directory is then made a package,
# so that the relative import below works.
if not __package__:
    __package__ = "brt_" + str(Path(__file__).parent.resolve()).encode().hex()
    sys.modules[__package__] = ModuleType(__package__)
    sys.modules[__package__].__path__ = [str(Path(__file__).parent)]
    __spec__ = None  # type: ignore[assignment]  # Python would warn: the old one has no package.

from .decoder_brt import Decoder, State, select  # noqa: E402 (the package has to exist)


def load(directory, dtype=torch.float32):
    """Returns the model in `directory` with weights of `dtype`; transformers is not needed."""
    from safetensors.torch import load_file

    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model, tensors = Decoder(SimpleNamespace(**config)), {}
    for file in sorted(directory.glob("model*.safetensors")):
        tensors |= {k.removeprefix("decoder."): v for k, v in load_file(file).items()}
    if config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.to(dtype).eval()


def count_padding(mask):
    """Returns the number [B] of padding ids before each text. The mask [B, T] is 0 for padding,
    which may be before and after texts."""
    padding = (mask.cumsum(dim=1) == 0).sum(dim=1)
    if (mask[:, 0].long() + (mask.long().diff(dim=1) > 0).sum(dim=1) > 1).any():
        raise ValueError("attention_mask is 0 within a text; only padding around texts is known")
    return padding


def begin_texts(ids, padding, bos):
    """Returns ids [B, T + 1], in which each text begins with `bos`, and their padding [B].

    Texts without this token get it. Texts that begin with it get one more id of padding."""
    first = ids.gather(1, padding.clamp(max=ids.shape[1] - 1)[:, None])[:, 0]
    begun = (first == bos) & (padding < ids.shape[1])
    padding = padding + begun
    ids = torch.cat([ids[:, :1], ids], dim=1)
    return ids.scatter(1, padding[:, None], bos), padding


if PreTrainedModel is not None:

    class BrtConfig(PretrainedConfig):
        """The settings in config.json, in the form that transformers' `from_pretrained` needs."""

        model_type, keys_to_ignore_at_inference = "brt", ("state",)

    @dataclass
    class BrtOutput(ModelOutput):
        """What `BrtForCausalLM` returns; the attributes have transformers' usual meaning, and
        `state` is the State after the last token."""

        loss: torch.Tensor | None = None
        logits: torch.Tensor | None = None
        state: State | None = None
        hidden_states: tuple | None = None

    class BrtForCausalLM(PreTrainedModel, GenerationMixin):
        """The model for transformers' `from_pretrained`, pipelines, Trainer and PEFT. It generates
        in constant memory. A text that does not begin with config.bos_token_id is read as if it
        did."""

        config_class, base_model_prefix, _no_split_modules = BrtConfig, "decoder", ["Layer"]
        _tied_weights_keys = {"decoder.lm_head.weight": "decoder.embed_tokens.weight"}  # noqa: RUF012
        _is_stateful = True
        _supports_default_dynamic_cache = classmethod(lambda cls: False)

        def __init__(self, config):
            super().__init__(config)
            self.decoder = Decoder(config)
            self.post_init()

        def get_input_embeddings(self):
            return self.decoder.embed_tokens

        def set_input_embeddings(self, value):
            self.decoder.embed_tokens = value

        def get_output_embeddings(self):
            return self.decoder.lm_head

        def set_output_embeddings(self, value):
            self.decoder.lm_head = value

        def forward(
            self, input_ids=None, state=None, attention_mask=None, labels=None, logits_to_keep=0,
            output_hidden_states=None, return_dict=None, **options,
        ):  # fmt: skip
            """Returns a BrtOutput for ids [B, T]. `state` is the State that an earlier call
            returned, and the ids continue the texts of that call. If `state` is None, the ids begin
            new texts. `attention_mask` is 0 for padding, which may precede or follow the texts. If
            padding follows a text, the returned state is wrong for this text."""
            for name in ("inputs_embeds", "position_ids", "output_attentions"):
                if (value := options.pop(name, None)) is not None and value is not False:
                    raise ValueError(f"{name} is not supported; remove it")
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            padding, begins = count_padding(mask[:, -input_ids.shape[1] :]), state is None
            if begins:
                input_ids, padding = begin_texts(input_ids, padding, self.config.bos_token_id)
            elif padding.any():
                raise ValueError("attention_mask has padding within texts that `state` continues")
            asked = self.config.output_hidden_states
            asked = asked if output_hidden_states is None else output_hidden_states
            vectors, state = self.decoder.read(input_ids, state, padding, asked)
            vectors = [x[:, 1:] if begins else x for x in vectors]
            logits, loss = self.decoder.logits(vectors[-1][:, -logits_to_keep:]), None
            if labels is not None:
                size = self.config.vocab_size
                loss = self.loss_function(logits, labels, vocab_size=size, **options)
            output = BrtOutput(loss, logits, state, tuple(vectors) if asked else None)
            return output.to_tuple() if return_dict is False else output

        def generate(self, inputs=None, generation_config=None, **options):
            """Returns what transformers' `generate` returns for the same arguments."""
            kept = getattr(generation_config or self.generation_config, "guidance_scale", None)
            # For guidance, transformers reads a second prompt, whose `state` it would not keep.
            if options.get("guidance_scale", kept) not in (None, 1):
                raise ValueError("guidance_scale is not supported; remove it")
            return super().generate(inputs, generation_config, **options)

        def prepare_inputs_for_generation(
            self, input_ids, state=None, attention_mask=None, continues=False, **options
        ):
            """Returns the arguments of `forward`. If `continues` is True, `state` is the State
            after all ids but the last. Otherwise, it is the State before all ids, or None."""
            if continues:
                input_ids, attention_mask = input_ids[:, -1:], None
            elif (
                attention_mask is not None
                and not (attention_mask[:, -1].bool() | ~attention_mask.bool().any(dim=1)).all()
            ):
                raise ValueError("pad prompts on the left: tokenizer.padding_side = 'left'")
            if state is not None and len(state.position) < len(input_ids):  # beams
                texts = torch.arange(len(state.position), device=input_ids.device)
                repeats = len(input_ids) // len(state.position)
                state = select(state, texts.repeat_interleave(repeats))
            names = "output_hidden_states", "logits_to_keep", "output_attentions"
            options = {name: options[name] for name in names if name in options}
            options |= {"attention_mask": attention_mask, "state": state}
            return {"input_ids": input_ids, **options}

        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
            updated = super()._update_model_kwargs_for_generation(
                outputs, model_kwargs, *args, **kwargs
            )
            return updated | {"state": outputs.state, "continues": True}

        def _reorder_cache(self, state, beam_idx):
            return select(state, beam_idx)

        def stream(self, input_ids, **options):
            """Yields what `Decoder.stream` yields; the ids must begin with config.bos_token_id."""
            return self.decoder.stream(input_ids, **options)
