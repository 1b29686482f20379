"""Modules of transformers, peft, torchmetrics and timm with what people use of them, trained on every layout."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from unusual_modules import Plain

LossOf = Callable[[Any, Tensor, Tensor], Tensor]
"""Returns the loss of a library's module on sequences of 3 features and their targets."""
QUERIES = ["q_proj", "v_proj"]
SMALL = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


class Foreign(Plain):
    """Trains a module of a library."""

    tp_plan = None

    def __init__(self, make: Callable[[], nn.Module], loss_of: LossOf) -> None:
        super().__init__()
        del self.embed, self.blocks, self.head
        self.model, self.loss_of = make(), loss_of

    def loss(self, x: Tensor, y: Tensor, task: int) -> Tensor:
        return self.loss_of(self.model, x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Measured(Plain):
    """Logs a metric object, and keeps its value of the last epoch beside its weights."""

    def __init__(self, metric: nn.Module, arguments_of: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.metric, self.arguments_of = metric, arguments_of

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        output = self.head(self.hidden(x, 0))
        self.metric(*self.arguments_of(output.detach(), y))
        is_collection = hasattr(self.metric, "items")
        log = self.log_dict if is_collection else functools.partial(self.log, "measured")
        log(self.metric, on_step=False, on_epoch=True)
        loss = (output - y).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        found = self.trainer.callback_metrics
        values = [torch.as_tensor(found[name], dtype=torch.float64) for name in sorted(found) if name != "loss"]
        self.register_buffer("values", torch.stack(values))


class Averaged(Plain):
    """Keeps an average of its head with timm's ModelEmaV3."""

    def on_fit_start(self) -> None:
        from timm.utils import ModelEmaV3

        self.averages = [ModelEmaV3(self.head, decay=0.9)]

    def on_train_step_end(self) -> None:
        self.averages[0].update(self.head)

    def on_train_end(self) -> None:
        for name, parameter in self.averages[0].module.named_parameters():
            self.register_buffer(f"average_{name}", parameter.detach().clone())


class ClippedByLayer(Plain):
    """Limits gradients by the norms of weights with timm's adaptive_clip_grad."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        from timm.utils.agc import adaptive_clip_grad

        adaptive_clip_grad(self.parameters(), 0.01)


class ScheduledByUpdates(Plain):
    """Steps a scheduler of timm by the number of updates."""

    def configure_optimizers(self) -> Any:
        from timm.scheduler import CosineLRScheduler

        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = CosineLRScheduler(optimizer, t_initial=8, t_in_epochs=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.trainer.global_step)


class DecaysByLayer(Foreign):
    """Has a learning rate for each layer, as timm's layer_decay gives it."""

    def configure_optimizers(self) -> Any:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(self.model, opt="sgd", lr=1e-3, momentum=0.9, layer_decay=0.7)


# --- losses ---


def tokens_of(x: Tensor) -> Tensor:
    """Return a token of 12 for each place of a sequence."""
    return (x.sum(2) * 100).long() % 12


def images_of(x: Tensor) -> Tensor:
    """Return images of 3 channels and 32 x 32 pixels."""
    x = x.transpose(1, 2)
    return (x[..., None] * x[..., None, :]).repeat(1, 1, 8, 8)


def of_logits(model: Any, x: Tensor, y: Tensor, **inputs: Any) -> Tensor:
    logits = model(input_ids=tokens_of(x), **inputs).logits[:, -4:]  # prompts come first
    return (logits.mean(2, keepdim=True) - y).square().mean()


def of_labels(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return model(input_ids=tokens_of(x), labels=tokens_of(x)).loss


def of_attentions(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(input_ids=tokens_of(x), output_attentions=True)
    return (output.logits.mean(2, keepdim=True) - y).square().mean() + output.attentions[0].square().mean()


def of_embeddings(model: Any, x: Tensor, y: Tensor) -> Tensor:
    embedded = model.get_input_embeddings()(tokens_of(x))
    return (model(inputs_embeds=1.1 * embedded).logits.mean(2, keepdim=True) - y).square().mean()


def of_padded(model: Any, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones_like(tokens_of(x))
    mask[:, -1] = 0
    return of_logits(model, x, y, attention_mask=mask)


def of_generated(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        tokens = model.generate(
            tokens_of(x)[:, :2], max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0
        )
    return (model(input_ids=tokens).logits.mean(2, keepdim=True) - y).square().mean()


def of_classes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return model(input_ids=tokens_of(x), labels=tokens_of(x)[:, 0] % 2).loss


def of_reference(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=tokens_of(x)).logits
    return (model(input_ids=tokens_of(x)).logits - reference - y).square().mean()


def of_images(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(images_of(x))
    return (getattr(output, "logits", output) - y.mean(1)).square().mean()


def of_both(model: Any, x: Tensor, y: Tensor) -> Tensor:
    output = model(input_ids=tokens_of(x), pixel_values=images_of(x))
    return (output.text_embeds - output.image_embeds).square().mean() * model.logit_scale.exp()


# --- models ---


def of_config(kind: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers with the values of a config."""

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, kind)(**settings))

    return make


def llama(**settings: Any) -> Callable[[], Any]:
    few = {"vocab_size": 12, "num_key_value_heads": 2, "max_position_embeddings": 8}
    return of_config("LlamaConfig", "LlamaForCausalLM", **{**SMALL, **few, **settings})


def changed(change: Callable[[Any], object], **settings: Any) -> Callable[[], Any]:
    """Return a function that builds a Llama and changes it."""

    def make() -> Any:
        model = llama(**settings)()
        change(model)
        return model

    return make


def adapted(kind: str, **settings: Any) -> Callable[[], Any]:
    """Return a function that builds a Llama with an adapter of peft."""

    def make() -> Any:
        import peft

        return peft.get_peft_model(llama()(), getattr(peft, kind)(**settings))

    return make


def with_two_adapters() -> Any:
    model = adapted("LoraConfig", r=2, target_modules=QUERIES, init_lora_weights=False)()
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    return model


def of_timm(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        return timm.create_model(name, num_classes=3, **settings)

    return make


def frozen_resnet() -> Any:
    from timm.layers import freeze_batch_norm_2d
    from timm.utils import freeze

    model = freeze_batch_norm_2d(of_timm("resnet10t", stem_width=4)())
    freeze(model, ["conv1", "layer1"])
    return model


PATCHES = {"image_size": 32, "patch_size": 16}
MAMBA = {"vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
BERT = {**SMALL, **NO_DROPOUT, "vocab_size": 12, "max_position_embeddings": 8}
VIT = {"img_size": 32, "depth": 2, "embed_dim": 8, "num_heads": 2}
SWIN = {"img_size": 32, "window_size": 2, "depths": (1, 1), "num_heads": (2, 2), "embed_dim": 8, "drop_path_rate": 0.0}
LORA = {"r": 2, "init_lora_weights": False}


def of_transformers() -> dict[str, Callable[[], Any]]:
    """Return modules of transformers."""
    gpt = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    t5 = {
        "vocab_size": 12,
        "dropout_rate": 0,
        "decoder_start_token_id": 0,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
    }
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    clip = {"text_config": {**SMALL, "vocab_size": 12, "max_position_embeddings": 8, "eos_token_id": 11}}
    clip["vision_config"] = {**SMALL, **PATCHES}
    rows: dict[str, tuple[Callable[[], Any], LossOf]] = {
        "Llama": (llama(), of_logits),
        "labels=": (llama(), of_labels),
        "tied embeddings": (llama(tie_word_embeddings=True), of_logits),
        "gradient_checkpointing_enable": (changed(lambda m: m.gradient_checkpointing_enable()), of_logits),
        "resize_token_embeddings": (changed(lambda m: m.resize_token_embeddings(14)), of_logits),
        "output_attentions": (llama(attn_implementation="eager"), of_attentions),
        "inputs_embeds": (llama(), of_embeddings),
        "frozen embeddings": (changed(lambda m: m.get_input_embeddings().requires_grad_(False)), of_logits),
        "padding": (llama(), of_padded),
        "generate in the step": (llama(), of_generated),
        "GPT-2": (of_config("GPT2Config", "GPT2LMHeadModel", vocab_size=12, **gpt), of_logits),
        "BERT": (of_config("BertConfig", "BertForMaskedLM", **BERT), of_logits),
        "BERT for classes": (of_config("BertConfig", "BertForSequenceClassification", **BERT), of_classes),
        "T5": (
            of_config("T5Config", "T5ForConditionalGeneration", **t5),
            of_labels,
        ),
        "Mixtral": (
            of_config("MixtralConfig", "MixtralForCausalLM", **SMALL, vocab_size=12, num_key_value_heads=2, **experts),
            of_logits,
        ),
        "ViT": (
            of_config(
                "ViTConfig", "ViTForImageClassification", **SMALL, **NO_DROPOUT, **PATCHES, num_labels=3
            ),
            of_images,
        ),
        "CLIP": (of_config("CLIPConfig", "CLIPModel", **clip, projection_dim=8), of_both),
        "Mamba": (
            of_config("MambaConfig", "MambaForCausalLM", **MAMBA),
            of_logits,
        ),
    }  # fmt: skip
    return {f"transformers: {name}": functools.partial(Foreign, *row) for name, row in rows.items()}


def of_peft() -> dict[str, Callable[[], Any]]:
    """Return a Llama with each kind of adapter of peft."""
    on_queries = {"target_modules": QUERIES}
    norms = ["input_layernorm", "post_attention_layernorm"]
    adapters = {
        "LoRA": adapted("LoraConfig", **LORA, **on_queries),
        "LoRA of all layers": adapted("LoraConfig", **LORA, target_modules="all-linear", task_type="CAUSAL_LM"),
        "LoRA with modules_to_save": adapted("LoraConfig", **LORA, **on_queries, modules_to_save=["lm_head"]),
        "LoRA of embeddings": adapted("LoraConfig", **LORA, target_modules=["embed_tokens", "q_proj"]),
        "two LoRA adapters": with_two_adapters,
        "DoRA": adapted("LoraConfig", r=2, **on_queries, use_dora=True),
        "rsLoRA": adapted("LoraConfig", **LORA, **on_queries, use_rslora=True),
        "AdaLoRA": adapted("AdaLoraConfig", init_r=3, target_r=2, total_step=20, **on_queries),
        "IA3": adapted("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "prompt tuning": adapted("PromptTuningConfig", num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "prefix tuning": adapted("PrefixTuningConfig", num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "p-tuning": adapted("PromptEncoderConfig", num_virtual_tokens=2, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        "LoHa": adapted("LoHaConfig", r=2, **on_queries, init_weights=False),
        "LoKr": adapted("LoKrConfig", r=2, **on_queries, init_weights=False),
        "OFT": adapted("OFTConfig", r=0, oft_block_size=4, **on_queries),
        "BOFT": adapted("BOFTConfig", boft_block_size=4, **on_queries),
        "VeRA": adapted("VeraConfig", r=2, **on_queries),
        "HRA": adapted("HRAConfig", r=2, **on_queries),
        "LN tuning": adapted("LNTuningConfig", target_modules=norms),
        "trainable tokens": adapted("TrainableTokensConfig", token_indices=[1, 2], target_modules=["embed_tokens"]),
    }
    rows = {name: functools.partial(Foreign, make, of_logits) for name, make in adapters.items()}
    rows["disable_adapter"] = functools.partial(Foreign, adapters["LoRA"], of_reference)
    return {f"peft: {name}": make for name, make in rows.items()}


def of_torchmetrics() -> dict[str, Callable[[], Any]]:
    """Return modules that log metric objects."""
    import torchmetrics

    def of_values(output: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return output.flatten(), y.flatten()

    def of_signs(output: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return output.flatten().sigmoid(), (y.flatten() > 0).long()

    def of_errors(output: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return ((output - y).square().flatten(),)

    def binary(kind: str) -> Any:
        return getattr(torchmetrics, kind)(task="binary")

    rows: dict[str, tuple[Callable[[], Any], Any]] = {
        "MeanSquaredError": (torchmetrics.MeanSquaredError, of_values),
        "R2Score": (torchmetrics.R2Score, of_values),
        "PearsonCorrCoef": (torchmetrics.PearsonCorrCoef, of_values),
        "SpearmanCorrCoef (lists)": (torchmetrics.SpearmanCorrCoef, of_values),
        "AUROC (lists)": (lambda: binary("AUROC"), of_signs),
        "Accuracy": (lambda: binary("Accuracy"), of_signs),
        "MeanMetric": (torchmetrics.MeanMetric, of_errors),
        "MetricCollection": (lambda: torchmetrics.MetricCollection([binary("Accuracy"), binary("F1Score")]), of_signs),
    }
    return {
        f"torchmetrics: {name}": lambda make=make, arguments_of=arguments_of: Measured(make(), arguments_of)
        for name, (make, arguments_of) in rows.items()
    }


def of_timm_models() -> dict[str, Callable[[], Any]]:
    """Return models and tools of timm."""
    models = {
        "ViT": of_timm("vit_tiny_patch16_224", **VIT),
        "ConvNeXt": of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 4, 8, 8)),
        "Swin": of_timm("swin_tiny_patch4_window7_224", **SWIN),
        "Mixer": of_timm("mixer_s32_224", img_size=32),
        "distilled DeiT": of_timm("deit_tiny_distilled_patch16_224", **VIT),
        "BEiT": of_timm("beit_base_patch16_224", **VIT),
        "ResNet with frozen layers": frozen_resnet,
    }
    rows: dict[str, Callable[[], Any]] = {
        **{name: functools.partial(Foreign, make, of_images) for name, make in models.items()},
        "layer_decay": functools.partial(DecaysByLayer, models["ViT"], of_images),
        "ModelEmaV3": Averaged,
        "adaptive_clip_grad": ClippedByLayer,
        "a scheduler of updates": ScheduledByUpdates,
    }
    return {f"timm: {name}": make for name, make in rows.items()}


def modules() -> dict[str, Callable[[], Any]]:
    """Return all rows of the catalogue: each makes a module."""
    return {**of_transformers(), **of_peft(), **of_torchmetrics(), **of_timm_models()}
