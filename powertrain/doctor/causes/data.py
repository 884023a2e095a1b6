"""Data sets and files of text."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "data-columns",
        r"JSON parse error: Column|DatasetGenerationCastError|must have the same columns|"
        r"Couldn't cast|CastError|changed from \w+ to \w+ in row|ArrowTypeError|"
        r"The features can't be aligned",
        "a column has different types or names in different rows or files of the data: Arrow wants "
        "one",
        "make them alike (one type, null where there is none; nested values as JSON strings); name "
        "the files of one kind with data_files; features=Features(...)",
        "数据的不同行或文件中某列类型或名称不同，而 Arrow 要求一致",
        "统一类型（缺失为 null；嵌套值存为 JSON 字符串）；用 data_files "
        "指定同类文件；features=Features(...)",
        "https://huggingface.co/docs/datasets/loading",
        confidence="likely",
    ),
    Cause(
        "json-lines",
        r"straddling object|Extra data: line \d+ column|Expecting value: line \d+ column|"
        r"Expecting ',' delimiter|Expecting property name|JSON parse error: (?:Missing|Invalid|"
        r"The document)",
        "the file is not JSON of the expected form: one big list instead of one object a line "
        "(or the other way round), empty, cut short, or an HTML or Git LFS page",
        "head -c 300 FILE; json.load for a list, one json.loads a line for .jsonl; "
        "load_dataset(\"json\", field=\"data\") for a list inside an object; download it again",
        "文件不是所读取的 JSON 形式：一个大列表而非每行一个对象（或相反）、为空、被截断，或为 "
        "HTML、Git LFS 页面",
        "head -c 300 FILE；列表用 json.load，.jsonl 逐行 json.loads；对象内的列表用 "
        "load_dataset(\"json\", field=\"data\")；重新下载",
        "https://huggingface.co/docs/datasets/loading#json",
        confidence="likely",
    ),
    Cause(
        "map-lengths",
        r"named \S{1,60} expected length \d+ but got length",
        "a batched map returns columns of different lengths: it makes more or fewer rows than it "
        "got, and the old columns stayed",
        "remove_columns=dataset.column_names in that map; return lists of one length",
        "batched map 返回的列长度不同：行数改变而旧列仍保留",
        "该 map 加 remove_columns=dataset.column_names；各列表长度一致",
        "https://huggingface.co/docs/datasets/process#batch-processing",
    ),
    Cause(
        "arrow-2gb",
        r"offset overflow while concatenating arrays|ArrowCapacityError|"
        r"array cannot contain more than \d+ bytes",
        "a piece of the data set is over Arrow's 2 GB for one column",
        "a smaller writer_batch_size (and batch_size) in map; large_string; shorter rows",
        "数据集的一块超过 Arrow 单列 2 GB 的上限",
        "map 中减小 writer_batch_size（及 batch_size）；large_string；缩短每行",
        "https://huggingface.co/docs/datasets/process",
    ),
    Cause(
        "dataset-verification",
        r"NonMatching(?:SplitsSizes|Checksum)Error|ExpectedMore(?:Splits|DownloadedFiles)|"
        r"UnexpectedSplits",
        "the data that was read is not as large as its card says: an incomplete download, chosen "
        "data_files, or a card that is out of date",
        "download_mode=\"force_redownload\"; verification_mode=\"no_checks\" where you know better",
        "读取的数据与数据集卡片不符：下载不完整、指定了 data_files，或卡片过时",
        "download_mode=\"force_redownload\"；确认无误时 verification_mode=\"no_checks\"",
        "https://huggingface.co/docs/datasets/loading",
        confidence="likely",
    ),
    Cause(
        "dataset-split",
        r"BuilderConfig '?[\w.-]{1,80}'? not found|Unknown split .?\w+|corresponds to no data|"
        r"Config name is missing|Bad split: ",
        "the data set has no such configuration or split, or it is empty",
        "the name or split that the message lists; get_dataset_config_names(id), "
        "get_dataset_split_names(id)",
        "数据集没有该配置或 split，或为空",
        "使用消息所列的名称；get_dataset_config_names(id)、get_dataset_split_names(id)",
        "https://huggingface.co/docs/datasets/load_hub",
    ),
    Cause(
        "fsspec-newer",
        r"Invalid pattern: '\*\*' can only be an entire path component",
        "datasets is older than the installed fsspec",
        "pip install --upgrade datasets (2.14.6 and newer), or pip install 'fsspec<2023.10'",
        "datasets 比所装的 fsspec 旧",
        "pip install --upgrade datasets（2.14.6 以上），或 pip install 'fsspec<2023.10'",
        "https://github.com/huggingface/datasets/issues/6737",
    ),
    Cause(
        "text-encoding",
        r"'(?P<codec>[\w-]+)' codec can't (?:de|en)code",
        "text is read or written as {codec}, which it is not: another encoding, a compressed or "
        "binary file, or a locale without UTF-8 (Windows)",
        "open(path, encoding=\"utf-8\"); PYTHONUTF8=1; LANG=C.UTF-8; byte 0x8b or 0x80 first: it is "
        "gzip or a pickle, open it as such",
        "文本按 {codec} 读写，但并非如此：其他编码、压缩或二进制文件，或非 UTF-8 "
        "的区域设置（Windows）",
        "open(path, encoding=\"utf-8\")；PYTHONUTF8=1；LANG=C.UTF-8；首字节 0x8b 或 0x80：为 gzip 或 "
        "pickle",
        "https://docs.python.org/3/howto/unicode.html",
        confidence="likely",
    ),
    Cause(
        "torchcodec-ffmpeg",
        r"Could not load libtorchcodec|libtorchcodec_core\d",
        "torchcodec finds no FFmpeg (versions 4 to 8) or was built for another torch",
        "conda install -c conda-forge ffmpeg (or apt install ffmpeg); the torchcodec of this torch "
        "(its README has the table)",
        "torchcodec 找不到 FFmpeg（4 至 8 版），或为另一 torch 编译",
        "conda install -c conda-forge ffmpeg（或 apt install ffmpeg）；与该 torch 对应的 torchcodec",
        "https://github.com/pytorch/torchcodec",
    ),
    Cause(
        "yaml-config",
        r"yaml\.(?:scanner|parser|constructor)\.\w+Error|is not in struct|"
        r"ConfigCompositionException|Could not override '|MissingConfigException|"
        r"ConfigAttributeError|ConfigKeyError",
        "the configuration file or an override is wrong: YAML's indentation or quotes, or a key "
        "that the program's schema does not have",
        "the line the message names; quotes around values with ': ' or '{'; +key=value adds a key "
        "in Hydra; keys of the program's release",
        "配置文件或覆盖项有误：YAML 缩进或引号，或程序没有该键",
        "查看消息所示行；含 ': ' 或 '{' 的值加引号；Hydra 用 +key=value 增加键；使用该版本的键",
        "https://hydra.cc/docs/advanced/override_grammar/basic/",
        confidence="likely",
    ),
)  # fmt: skip
