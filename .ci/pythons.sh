# Sourced by the scripts beside it: finds interpreters.

can_run() {  # can_run EXE CONDITION: is it an interpreter that can make a venv, of such a version?
    "$1" -c "import ensurepip, sys; v = sys.version_info[:2]; sys.exit(not ($2))" 2>/dev/null </dev/null
}

find_python() {  # find_python 3.11: prints the path of one that really runs (a pyenv shim may not)
    local exe
    while IFS= read -r exe; do
        if can_run "$exe" "v == (${1/./, })"; then
            "$exe" -c 'import sys; print(sys.executable)' </dev/null
            return
        fi
    done < <(type -ap "python$1"; ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1" 2>/dev/null)
}
