//! Compiles the kernels and generates Rust code from their signatures. Also writes files that the linker takes for the CUDA libraries,
//! so that the built extension loads on machines without these libraries.

#[path = "build/bindings.rs"]
mod bindings;
#[path = "build/signature.rs"]
mod signature;
#[path = "src/structs.rs"]
#[allow(dead_code, reason = "only the layouts are needed here")]
mod structs;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use std::{env, fs, io, thread};

#[path = "src/architectures.rs"]
#[allow(dead_code, reason = "the crate uses the rest")]
mod architectures;

use architectures::{ARCHITECTURES, Architecture};

/// Libraries that candle asks the linker for. `src/linked/symbols.rs` defines the functions of these libraries that are called,
/// so the linker needs only an empty file for each library.
const LINKED_LIBRARIES: [&str; 5] = ["cuda", "cublas", "cublasLt", "curand", "nvrtc"];
/// An `ar` archive without members.
const EMPTY_ARCHIVE: &[u8] = b"!<arch>\n";
/// Environment variables that may name the folder of the CUDA toolkit.
const TOOLKIT_VARIABLES: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
/// The environment variable with the architectures to compile for, in the form of [`architectures::ARCHITECTURES`].
const ARCHITECTURES_VARIABLE: &str = "TRAINABLE_CANDLE_CUDA_ARCHS";

/// Kernel files whose names end with this suffix (before `.cu`) have code for compute capability 9.0 only.
const HOPPER: &str = "_hopper";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for variable in TOOLKIT_VARIABLES.into_iter().chain([ARCHITECTURES_VARIABLE]) {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-changed=include");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if let Err(error) = prepare_libraries(&out).and_then(|()| compile_kernels(&out)) {
        println!("cargo::error={error}");
    }
}

fn prepare_libraries(out: &Path) -> io::Result<()> {
    for name in LINKED_LIBRARIES {
        fs::write(out.join(format!("lib{name}.a")), EMPTY_ARCHIVE)?;
    }
    // The linker looks for `libcudart`. This copy gives it the static runtime, which opens the driver when a program
    // first uses the runtime.
    let runtime = find(&["lib/libcudart_static.a", "lib64/libcudart_static.a"])?;
    fs::copy(runtime, out.join("libcudart.a"))?;
    println!("cargo::rustc-link-search=native={}", out.display());
    Ok(())
}

/// Makes a `<name>.fatbin` for each `kernels/<name>.cu`, and one `kernels.rs` for all.
fn compile_kernels(out: &Path) -> io::Result<()> {
    let nvcc = find(&["bin/nvcc"])?;
    let list = env::var(ARCHITECTURES_VARIABLE).unwrap_or_else(|_| ARCHITECTURES.to_owned());
    let targets = targets(&list)?;
    println!("cargo::rustc-env=COMPILED_ARCHITECTURES={list}");
    // The time of the last change of any header.
    let headers = files("include", "cuh")?.iter().filter_map(|path| modified(path)).max();
    let sources = files("kernels", "cu")?;
    // The time when this build script was built.
    let script = env::current_exe().ok().and_then(|program| modified(&program));
    // A generated file is out of date if it does not exist, or if something that it depends on is newer.
    let unread = sources.iter().filter(|source| {
        let read = modified(&generated(out, source, "signatures"));
        [modified(source), headers, script].iter().any(|change| read.is_none() || read < *change)
    });
    in_parallel(unread, |source| read_signatures(&nvcc, source, out))?;
    write_host_side(out, &sources)?;
    // If the targets have changed, every kernel file is compiled again.
    let record = out.join("targets");
    let wanted = targets.join(" ");
    let targets_are_same = fs::read_to_string(&record).is_ok_and(|found| found == wanted);
    let stale = sources.iter().filter(|source| {
        let compiled = modified(&generated(out, source, "fatbin"));
        let changes = [modified(source), headers, modified(&generated(out, source, "cu"))];
        !targets_are_same || changes.iter().any(|change| compiled.is_none() || compiled < *change)
    });
    in_parallel(stale, |source| compile(&nvcc, source, &targets, out))?;
    fs::write(record, wanted)
}

/// Runs a job for each source, as many at a time as cargo allows.
fn in_parallel<'a>(
    sources: impl Iterator<Item = &'a PathBuf>,
    run: impl Fn(&Path) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let workers = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1usize).max(1);
    for batch in sources.collect::<Vec<_>>().chunks(workers) {
        thread::scope(|scope| {
            let running: Vec<_> = batch.iter().map(|source| scope.spawn(|| run(source))).collect();
            running.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
        })?;
    }
    Ok(())
}

/// Writes `<name>.signatures`: a line with the names of all structures, then a line for each kernel.
fn read_signatures(nvcc: &Path, source: &Path, out: &Path) -> io::Result<()> {
    let preprocessed = run_nvcc(nvcc, source, ["-E".as_ref(), source.as_os_str()])?;
    let preprocessed = String::from_utf8_lossy(&preprocessed);
    let mut lines = vec![signature::structures(&preprocessed).into_iter().collect::<Vec<_>>().join(" ")];
    let invalid = |reason: String| io::Error::other(format!("{}: {reason}", source.display()));
    lines.extend(signature::heads(&preprocessed).map_err(invalid)?);
    fs::write(generated(out, source, "signatures"), lines.join("\n"))
}

/// Writes the Rust code of all kernels and, for each source, the `.cu` file that nvcc compiles: it includes the source, and asserts that
/// the structures that kernels and host share have the same memory layout in CUDA as in Rust.
fn write_host_side(out: &Path, sources: &[PathBuf]) -> io::Result<()> {
    let mut code = String::new();
    for path in sources {
        let invalid = |reason: String| io::Error::other(format!("{}: {reason}", path.display()));
        let name = path.file_stem().expect("a source has a name").to_string_lossy().into_owned();
        let lines = fs::read_to_string(generated(out, path, "signatures"))?;
        let (structures, heads) = lines.split_once('\n').unwrap_or((&lines, ""));
        let unit = bindings::unit(&name, &structures.split(' ').collect::<Vec<_>>());
        write_changed(&generated(out, path, "cu"), &unit)?;
        let signatures = heads.lines().map(signature::parse).collect::<Result<_, _>>().map_err(invalid)?;
        code.push_str(&bindings::module(&bindings::Source { name, signatures }).map_err(invalid)?);
    }
    write_changed(&out.join("kernels.rs"), &code)
}

/// Compiles the `.cu` file that is generated for `source` to a `.fatbin` file with code for all `targets` that suit the source.
fn compile(nvcc: &Path, source: &Path, targets: &[String], out: &Path) -> io::Result<()> {
    let is_hopper = source.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with(HOPPER));
    let targets: Vec<&String> = targets.iter().filter(|target| !is_hopper || target.ends_with("_90a")).collect();
    let (unit, fatbin) = (generated(out, source, "cu"), generated(out, source, "fatbin"));
    if targets.is_empty() {
        // A Hopper file, and the list of architectures lacks 9.0a. An empty file is a module without code.
        return fs::write(fatbin, []);
    }
    let fixed = ["-O3", "-fatbin", "--compress-mode=size", "-I", "."].map(OsStr::new);
    let targets = targets.iter().map(OsStr::new);
    let files = [unit.as_os_str(), "-o".as_ref(), fatbin.as_os_str()];
    run_nvcc(nvcc, source, fixed.into_iter().chain(targets).chain(files)).map(|_| ())
}

/// Runs nvcc and returns its standard output.
fn run_nvcc<'a>(nvcc: &Path, source: &Path, arguments: impl IntoIterator<Item = &'a OsStr>) -> io::Result<Vec<u8>> {
    let result = Command::new(nvcc).args(["-std=c++17", "-I", "include"]).args(arguments).output()?;
    if result.status.success() {
        return Ok(result.stdout);
    }
    let reason = String::from_utf8_lossy(&result.stderr).replace('\n', " | ");
    Err(io::Error::other(format!("nvcc cannot compile {}: {reason}", source.display())))
}

/// nvcc's arguments for a list of architectures.
fn targets(list: &str) -> io::Result<Vec<String>> {
    let architectures = Architecture::parse_list(list).ok_or_else(|| {
        let message = format!("{ARCHITECTURES_VARIABLE} is \"{list}\"; expected a list such as {ARCHITECTURES}");
        io::Error::new(io::ErrorKind::InvalidInput, message)
    })?;
    let mut targets = Vec::new();
    for architecture in architectures {
        targets.push(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
        if architecture.has_ptx {
            targets.push(format!("-gencode=arch=compute_{architecture},code=compute_{architecture}"));
        }
    }
    Ok(targets)
}

/// The path of a file that is generated from a source.
fn generated(out: &Path, source: &Path, extension: &str) -> PathBuf {
    out.join(source.with_extension(extension).file_name().expect("a source has a name"))
}

/// Writes a file unless it already has these contents: an unchanged file keeps its modification time, so nothing that depends on it is
/// built again.
fn write_changed(path: &Path, text: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|found| found == text) { Ok(()) } else { fs::write(path, text) }
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|metadata| metadata.modified()).ok()
}

fn files(folder: &str, extension: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The path of the first of `files` that exists in a CUDA toolkit. The toolkit may have the layout of PyPI's packages or of NVIDIA's
/// installer.
fn find(files: &[&str]) -> io::Result<PathBuf> {
    let roots = TOOLKIT_VARIABLES.iter().filter_map(env::var_os).chain([("/usr/local/cuda").into()]);
    let places: Vec<PathBuf> =
        roots.flat_map(|root| files.iter().map(move |file| Path::new(&root).join(file))).collect();
    places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let message = format!("the feature `cuda` needs a CUDA toolkit; set CUDA_HOME to it (looked at {places:?})");
        io::Error::new(io::ErrorKind::NotFound, message)
    })
}
