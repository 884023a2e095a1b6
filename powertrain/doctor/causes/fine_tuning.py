"""Adapters, tokenizers and data of fine-tuning."""

import re

from powertrain.doctor.causes.cause import Cause
from powertrain.doctor.excerpt import Excerpt
from powertrain.doctor.frames import code_line

_TRANSFORMERS = "https://huggingface.co/docs/transformers/"
_DATASETS = "https://huggingface.co/docs/datasets/"

_OPTIMIZER = re.compile(r"[/\\]optim[/\\]|exp_avg|momentum_buffer|multi_tensor|fused_adam|lr_scheduler|\bbuf\.mul_")


def _in_optimizer(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    return {} if any(map(_OPTIMIZER.search, excerpt.above[-6:])) else None


def _in_auto_class(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    auto_class = re.compile(r"configuration_auto|auto_factory|CONFIG_MAPPING|AutoConfig")
    is_about_config = any(map(auto_class.search, excerpt.above[-6:]))
    kind = (groups.get("kind") or groups.get("config") or "").split(".")[-1]
    return {"model": kind} if is_about_config else None


_ROW = re.compile(
    r"\b(?:features?|examples?|batch|rows?|items?|samples?|inputs|records?|instances?|sources?|data|d|x|ex)\["
)
_NO_ROW = re.compile(r"ckpt|checkpoint|state_dict|config|environ")


def _in_row(groups: dict[str, str], excerpt: Excerpt) -> dict[str, str] | None:
    code = code_line(excerpt.above)
    return {"code": code} if _ROW.search(code) and not _NO_ROW.search(code) else None


CAUSES = (
    Cause(
        "row-without-column",
        r"^\W{0,9}(?:\[rank\d+\]: )?KeyError: '(?P<name>\w{1,60})'",
        "a row or batch has no column {name} (`{code}`): Trainer removes columns that the model's forward does not "
        "take, or the data has another format or spelling",
        "remove_unused_columns=False in TrainingArguments; print(dataset.column_names); rename_column; the step that "
        "makes {name} must run before",
        "某一行或 batch 没有列 {name}（`{code}`）：Trainer 会删除模型 forward 不接受的列，或数据格式、拼写不同",
        "TrainingArguments 中 remove_unused_columns=False；print(dataset.column_names)；rename_column；先运行产生 "
        "{name} 的步骤",
        "https://github.com/mymusise/ChatGLM-Tuning/issues/258",
        confidence="likely",
        derive=_in_row,
        derives=("code",),
    ),
    Cause(
        "adapter-name",
        r"Adapter (?P<name>\S{1,80}) not found in|Adapter with name (?P<other>\S{1,80}) already exists|"
        r"adapter `?(?P<third>\S{1,60}?)`? (?:does not exist|is not loaded)",
        "no adapter {name}{other}{third} is loaded under that name (or it is loaded twice): load_adapter, set_adapter "
        "and add_adapter must use one adapter_name; a merge leaves the old config behind",
        "print(model.peft_config.keys()); adapter_name=... in PeftModel.from_pretrained and load_adapter; a freshly "
        "loaded base model after merge_and_unload; pip install --upgrade peft",
        "没有以该名称加载的适配器 {name}{other}{third}（或重复加载）：load_adapter、set_adapter、add_adapter 须用同一 "
        "adapter_name",
        "print(model.peft_config.keys())；在 from_pretrained 与 load_adapter 中指定 adapter_name；merge_and_unload "
        "后重新加载基础模型；升级 peft",
        "https://github.com/huggingface/peft/issues/1574",
        confidence="likely",
    ),
    Cause(
        "optimizer-state-sizes",
        r"size of tensor a \(\d+\) must match the size of tensor b|sizes do not match at |RuntimeError: Size "
        r"mismatch\s*$|"
        r"output with shape \[[\d, ]{0,60}\] doesn't match the broadcast shape|The expanded size of the tensor",
        "the optimizer's state (moments) has other sizes than the parameters: it was saved by another number of "
        "ranks, with other frozen layers or adapters, or parameters in another order",
        "resume with the same number of ranks, model and parameter groups, or gather the full optimizer state before "
        "saving (FSDP: full_optim_state_dict, get_optimizer_state_dict); or load the weights alone and begin "
        "with a new optimizer",
        "优化器状态（动量）的大小与参数不同：由不同数量的 rank 保存、冻结层或适配器不同，或参数顺序不同",
        "用相同的 rank 数、模型与参数组恢复，或保存前聚合完整的优化器状态（FSDP：full_optim_state_dict）；"
        "或只加载权重，重新开始优化器",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/16815",
        confidence="likely",
        derive=_in_optimizer,
    ),
    Cause(
        "model-type-unknown",
        r"^\W{0,9}(?:\[rank\d+\]: )?KeyError: (?:'(?P<kind>[\w.-]{1,60})'|<class '(?P<config>[\w.]{1,200})'>)",
        "the installed transformers does not know the model type {model}: it is older than the model, or the model's "
        "code comes with another package or with trust_remote_code",
        "pip install --upgrade transformers; the package that the model's page names (its own repository); "
        "trust_remote_code=True where the model brings its code",
        "所装 transformers 不认识模型类型 {model}：比模型旧，或模型代码来自其他包或 trust_remote_code",
        "pip install --upgrade transformers；安装模型页面所示的包（其自己的仓库）；模型自带代码时 "
        "trust_remote_code=True",
        "https://github.com/bigcode-project/starcoder/issues/18",
        confidence="likely",
        derive=_in_auto_class,
        derives=("model",),
    ),
    Cause(
        "data-column-missing",
        r"^\W{0,9}(?:\[rank\d+\]: )?KeyError: '(?P<name>text|messages|prompt|chosen|rejected|completion|instruction|"
        r"input|"
        r"output|labels|label|input_ids|attention_mask|conversations|question|answer|image|images|response|query|from|"
        r"value|role|content)'|"
        r"Column name \['?(?P<column>[^\]']{1,60})'?\] not in the dataset|"
        r"Column (?:name )?'?(?P<other>\w{1,60})'? (?:not|doesn't exist) in (?:the )?dataset",
        "the data has no column {name}{column}{other}: the data set is of another format than the trainer or template "
        "expects, or an earlier step dropped it",
        "print(dataset.column_names) and dataset[0]; rename_column or a formatting function; "
        "remove_unused_columns=False; the chat or preference format of the trainer's documentation",
        "数据没有列 {name}{column}{other}：格式与训练器或模板所需不同，或先前的步骤删除了它",
        "print(dataset.column_names) 与 dataset[0]；rename_column 或格式化函数；remove_unused_columns=False；"
        "使用训练器文档中的格式",
        "https://huggingface.co/docs/trl/dataset_formats",
        confidence="likely",
    ),
    Cause(
        "dataset-empty",
        r"IndexError: Invalid key: \d+ is out of bounds for size 0|num_rows: 0\b|"
        r"torch\.cat\(\): expected a non-empty list|expected reduction dim to be specified for input\.numel\(\) == 0|"
        r"Expected reduction dim to be specified for input\.numel|stack expects a non-empty TensorList|"
        r"zero-size array to reduction operation",
        "nothing is left of the data (or of one batch): every row was filtered, is too long, or its columns were "
        "removed because the model's forward has no such arguments",
        "len(dataset) after each step; remove_unused_columns=False in TrainingArguments; a larger max_length; a "
        "split of another name",
        "数据（或某个 batch）为空：全部被过滤、过长，或列因模型 forward 没有对应参数而被删除",
        "每一步后 len(dataset)；TrainingArguments 中 remove_unused_columns=False；增大 max_length；检查 split 名称",
        "https://discuss.huggingface.co/t/indexerror-invalid-key-16-is-out-of-bounds-for-size-0/14298",
        confidence="likely",
    ),
    Cause(
        "map-worker-died",
        r"One of the subprocesses has abruptly died during map",
        "a process of dataset.map(num_proc=...) was ended, most often for memory, or crashed in a library",
        "a smaller num_proc, batch_size and writer_batch_size; num_proc=1 shows the error; "
        "TOKENIZERS_PARALLELISM=false; dmesg for the kernel's out-of-memory killer",
        "dataset.map(num_proc=...) 的进程被结束，多因内存，或在某个库中崩溃",
        "减小 num_proc、batch_size、writer_batch_size；num_proc=1 可看到错误；TOKENIZERS_PARALLELISM=false；用 dmesg "
        "检查 OOM",
        _DATASETS + "process",
        confidence="likely",
    ),
    Cause(
        "arrow-too-large",
        r"Invalid flatbuffers message|List index overflow",
        "one Arrow record holds more than its offsets or header can say (nested lists of millions of values in one "
        "batch)",
        "writer_batch_size=100 (or less) when it is written; large_list or Array2D features; several smaller files",
        "单个 Arrow 记录超出偏移或消息头的上限（一批中有数百万值的嵌套列表）",
        "写入时 writer_batch_size=100 或更小；使用 large_list 或 Array2D；拆成更小的文件",
        "https://github.com/huggingface/datasets/issues/7346",
        confidence="likely",
    ),
    Cause(
        "chat-roles",
        r"Conversation roles must alternate|[Ss]ystem role not supported|Only user and assistant roles|"
        r"UndefinedError: '(?:list|str|dict) object' has no (?:attribute|element)|jinja2\.exceptions\.\w+|"
        r"After the optional system message, conversation roles must",
        "the chat template refuses these messages: roles that do not alternate, a system role it has no place for, or "
        "a list of conversations where one is expected",
        "user and assistant in turn, the system text in the first user message; messages as "
        "[{\"role\": ..., \"content\": ...}]; the template that belongs to the model (tokenizer.chat_template)",
        "对话模板拒绝这些消息：角色没有交替、不支持 system 角色，或传入了对话列表的列表",
        "user 与 assistant 交替，system 内容并入第一条 user；消息为 [{\"role\": ..., \"content\": ...}]；"
        "使用模型自己的模板",
        _TRANSFORMERS + "chat_templating",
    ),
    Cause(
        "tokenizer-input",
        r"TextEncodeInput must be Union|text input must be of type `str`|TextInputSequence must be str|"
        r"PreTokenizedInputSequence must be|argument 'ids': '\w+' object cannot be|argument 'text': ",
        "the tokenizer got something else than text: None or NaN in a column, numbers, or a nested list",
        "filter rows without text; str(x); a list of strings (is_split_into_words=True for words)",
        "分词器得到的不是文本：列中的 None 或 NaN、数字，或嵌套列表",
        "过滤没有文本的行；str(x)；字符串列表（单词用 is_split_into_words=True）",
        _TRANSFORMERS + "main_classes/tokenizer",
    ),
    Cause(
        "token-id-outside",
        r"piece id is out of range|can't convert negative int to unsigned|out of range integral type conversion "
        r"attempted|"
        r"can't convert negative value to unsigned",
        "ids that are no token are decoded: -100 of labels, padding of predictions, or ids beyond the tokenizer's "
        "vocabulary",
        "np.where(ids != -100, ids, tokenizer.pad_token_id) before batch_decode; model and tokenizer of one checkpoint",
        "解码了不是 token 的 id：labels 的 -100、预测的填充，或超出词表的 id",
        "batch_decode 前 np.where(ids != -100, ids, tokenizer.pad_token_id)；模型与分词器来自同一检查点",
        "https://github.com/huggingface/transformers/issues/24433",
    ),
    Cause(
        "inputs-missing",
        r"You have to specify either (?:decoder_)?input_ids or|You must specify exactly one of input_ids or|"
        r"You cannot specify both (?:decoder_)?input_ids and|should supply an encoding .{0,80}includes input_ids",
        "the model got no input_ids (or both ids and embeddings): the batch has columns of other names, or an "
        "encoder-decoder model has no labels",
        "print(batch.keys()); tokenize with the model's tokenizer; labels for encoder-decoder models; one of input_ids "
        "and inputs_embeds",
        "模型没有得到 input_ids（或同时得到 ids 与 embeds）：batch 的列名不同，或编码器-解码器模型缺少 labels",
        "print(batch.keys())；用模型的分词器分词；编码器-解码器模型需 labels；input_ids 与 inputs_embeds 二选一",
        _TRANSFORMERS + "troubleshooting",
    ),
    Cause(
        "weights-of-another-size",
        r"Trying to set a tensor of shape torch\.Size\(\[(?P<saved>[\d, ]{0,60})\]\) in \"(?P<name>\w+)\" \(which has "
        r"shape "
        r"torch\.Size\(\[(?P<have>[\d, ]{0,60})\]\)|state dictionary of the model you are trying to load is corrupted",
        "the file has [{saved}] where the model has [{have}]: another config, a vocabulary that was resized for added "
        "tokens, or files saved in parts (ZeRO-3) or damaged",
        "config.json and weights of one checkpoint; vocab_size as saved (resize_token_embeddings after loading); "
        "gather weights before saving (stage3_gather_16bit_weights_on_model_save); download again",
        "文件中为 [{saved}]，模型为 [{have}]：配置不同、词表因新增 token 改变，或文件分片保存（ZeRO-3）、损坏",
        "config.json 与权重来自同一检查点；vocab_size 与保存时一致（加载后再 resize_token_embeddings）；保存前聚合；"
        "重新下载",
        "https://github.com/huggingface/transformers/issues/24445",
        confidence="likely",
    ),
    Cause(
        "checkpoint-of-another-layout",
        r"^\W{0,9}(?:\[rank\d+\]: )?KeyError: '(?P<key>state_dict|model_state_dict|model|module|optimizer|"
        r"optimizer_state_dict|"
        r"net|params|params_ema|ema|epoch|weights|teacher|student|model_ema)'",
        "the checkpoint file has no entry {key}: it was saved with other names (plain weights, another program's "
        "layout)",
        "print(torch.load(path, weights_only=True).keys()), and load that; plain weights go to load_state_dict "
        "themselves",
        "检查点文件没有 {key}：以其他名称保存（只有权重，或其他程序的格式）",
        "print(torch.load(path, weights_only=True).keys()) 后按实际键加载；只有权重时直接 load_state_dict",
        "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html",
        confidence="likely",
    ),
    Cause(
        "scalar-concatenated",
        r"zero-dimensional tensor \(at position \d+\) cannot be concatenated|operands could not be broadcast together",
        "arrays that do not fit are joined: scalars (losses) in cat, or outputs of different lengths from different "
        "batches",
        "torch.stack or unsqueeze(0) for scalars; pad predictions to one length (accelerator.pad_across_processes), "
        "eval_accumulation_steps with equal shapes",
        "合并了形状不符的数组：cat 中的标量（损失），或不同 batch 的输出长度不同",
        "标量用 torch.stack 或 unsqueeze(0)；预测补齐到相同长度（accelerator.pad_across_processes）",
        "https://docs.pytorch.org/docs/stable/generated/torch.cat.html",
        confidence="likely",
    ),
    Cause(
        "lora-layer-kind",
        r"Target module .{1,200} is not supported\. Currently, only|length of enable_lora must divide|"
        r"local variable ['‘]new_module['’] referenced before assignment|"
        r"cannot access local variable 'new_module'",
        "PEFT has no adapter for this kind of layer: a quantized layer (GPTQ, AWQ, 4 bit) of a library that this "
        "release does not know, or a module that is no linear layer",
        "pip install --upgrade peft (and the quantization's library); names of linear layers in target_modules "
        "(\"all-linear\")",
        "PEFT 没有这种层的适配器：该版本不认识的量化层（GPTQ、AWQ、4 bit），或不是线性层",
        "pip install --upgrade peft（及量化库）；target_modules 写线性层的名称（\"all-linear\"）",
        "https://github.com/oobabooga/textgen/issues/710",
        confidence="likely",
    ),
)  # fmt: skip
