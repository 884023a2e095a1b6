"""Translation of messages of gcc, ld, the loader and bash to English: causes are recognized by English messages.

Messages of pip, torch and CUDA are in English everywhere.
"""

import re

# a part of a message that only such a line has; the message, as a pattern; the English one
_MESSAGES: tuple[tuple[str, str, str], ...] = tuple(
    (part, pattern.replace("@", re.escape(part)), english)
    for english, pattern, parts in (
        (
            ": No such file or directory",
            r"\s?(?::|：)\s?@",
            (
                "没有那个文件或目录", "沒有此一檔案或目錄", "Datei oder Verzeichnis nicht gefunden",
                "Aucun fichier ou dossier de ce type", "No existe el fichero o el directorio",
                "No existe el archivo o el directorio", "そのようなファイルやディレクトリはありません",
                "Нет такого файла или каталога", "Arquivo ou diretório inexistente", "File o directory non esistente",
                "Nie ma takiego pliku ani katalogu", "그런 파일이나 디렉터리가 없습니다",
                "Böyle bir dosya ya da dizin yok",
            ),
        ),
        (
            "No space left on device",
            "@",
            ("设备上没有空间", "Auf dem Gerät ist kein Speicherplatz mehr verfügbar",
             "Aucun espace disponible sur le périphérique", "No queda espacio en el dispositivo"),
        ),
        ("Permission denied", "@", ("权限不够", "Keine Berechtigung", "Permission non accordée", "Permiso denegado")),
        ("cannot open shared object file", "@", ("无法打开共享对象文件", "Kann die Shared-Object-Datei nicht öffnen",
                                                 "Ne peut ouvrir le fichier d'objet partagé")),
        (
            "fatal error: ",
            r"@\s?(?::|：)\s?",
            ("致命错误", "致命錯誤", "schwerwiegender Fehler", "erreur fatale", "error fatal", "致命的エラー",
             "фатальная ошибка", "erro fatal", "errore irreversibile", "błąd krytyczny", "치명적인 오류",
             "치명적 오류"),
        ),
        ("error: ", r"@\s?(?::|：)\s?", ("错误", "錯誤", "Fehler", "erreur", "エラー", "ошибка")),
        (r"cannot find \1", r"@\s?(-l[\w+.-]+)", ("找不到", "ne peut trouver", "impossible de trouver",
                                                 "no se puede encontrar", "не найти")),
        (r"cannot find \1", r"(-l[\w+.-]+) @", ("kann nicht gefunden werden", "が見つかりません")),
        (r"undefined reference to `\1'", r"对(?:‘|“|`)([^\n]{1,200}?)(?:’|”|')@", ("未定义的引用",)),
        (r"undefined reference to `\1'", r"@ (?:»|«|„|`)\s?([^\n]{1,200}?)\s?(?:«|»|“|')",
         ("Nicht definierter Verweis auf", "nicht definierter Verweis auf", "référence indéfinie vers")),
        ("Segmentation fault", "@", ("段错误", "Speicherzugriffsfehler", "Erreur de segmentation")),
        (": command not found", r"\s?(?::|：)\s?@\.?",
         ("未找到命令", "Kommando nicht gefunden", "Befehl nicht gefunden", "commande introuvable",
          "orden no encontrada",
          "no se encontró la orden", "comando não encontrado", "comando non trovato", "команда не найдена",
          "не найдено",
          "コマンドが見つかりません", "명령어를 찾을 수 없음", "nie znaleziono polecenia")),
        ("Killed", "@", ("已杀死", "Getötet", "Processus arrêté")),
    )
    for part in parts
)  # fmt: skip


def in_english(data: bytes) -> bytes:
    """The log with these messages replaced by the English ones. All other text, and the number of lines, stays."""
    for part, pattern, english in _MESSAGES:
        if part.encode() in data:
            data = re.sub(pattern.encode(), english.encode(), data)
    return data
