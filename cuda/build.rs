//! Prepares what the linker asks for under the names of the CUDA libraries, so that the result needs none of them to be loaded.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Libraries whose functions `src/symbols.rs` stands in for. The linker wants a file of each name; it may be empty.
const STOOD_IN: [&str; 5] = ["cuda", "cublas", "cublasLt", "curand", "nvrtc"];
/// An `ar` archive without members.
const EMPTY_ARCHIVE: &[u8] = b"!<arch>\n";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for variable in TOOLKIT_VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if let Err(error) = prepare(&out) {
        println!("cargo::error={error}");
    }
}

const TOOLKIT_VARIABLES: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];

fn prepare(out: &Path) -> io::Result<()> {
    for name in STOOD_IN {
        fs::write(out.join(format!("lib{name}.a")), EMPTY_ARCHIVE)?;
    }
    // The static runtime under the name of the shared one: it opens the driver by itself, when it is first used.
    let runtime = find_static_runtime()?;
    fs::copy(runtime, out.join("libcudart.a"))?;
    println!("cargo::rustc-link-search=native={}", out.display());
    Ok(())
}

/// `libcudart_static.a` of the CUDA toolkit: as PyPI's packages or as NVIDIA's installer lays it out.
fn find_static_runtime() -> io::Result<PathBuf> {
    let roots = TOOLKIT_VARIABLES.iter().filter_map(env::var_os).chain([("/usr/local/cuda").into()]);
    let places = roots.flat_map(|root| ["lib", "lib64"].map(|folder| Path::new(&root).join(folder)));
    let candidates: Vec<PathBuf> = places.map(|folder| folder.join("libcudart_static.a")).collect();
    candidates.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!("the feature `cuda` needs libcudart_static.a; set CUDA_HOME to the toolkit (looked at {candidates:?})"),
        )
    })
}
