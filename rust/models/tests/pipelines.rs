//! Tests that the entries of the table of pipelines are consistent, and that models get the right place in a pipeline.

use std::path::{Path, PathBuf};

use trainable_candle_io::adapter_file::Style;
use trainable_candle_models::pipelines::{PIPELINES, Pipeline, Place};
use trainable_candle_models::pretrained::CheckpointNaming;
use trainable_candle_models::{Architecture, CLIPTextModel, Choice, Pretrained};

/// A small SDXL pipeline.
fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sdxl")
}

/// A place is a part of a pipeline. Its `published` returns the `config.json` of the part's published model, and
/// `shapes` builds a model without values from such a configuration.
#[test]
fn published_configurations_identify_and_build_their_parts() {
    for place in PIPELINES.iter().flat_map(|pipeline| pipeline.places()) {
        let config = (place.part.published)();
        let found = Place::by_configuration(place.part.model, &config).unwrap();
        if found.part.subfolder.is_empty() && !place.part.subfolder.is_empty() {
            // This text encoder has the configuration of a language model, which is a pipeline of its own. That
            // pipeline takes precedence.
            continue;
        }
        // Several pipelines share parts, so only the configuration is compared.
        assert_eq!((found.part.published)(), config, "{} {}", place.pipeline.name, place.part.subfolder);
        assert_eq!((place.part.model.shapes)(&config).unwrap().configuration(), config);
    }
}

/// A kind's mark is a prefix of parameter names, by which messages recognise the kind. A section is the set of keys
/// under which a checkpoint in one file stores a part; its probe is a key that every file with the section has.
#[test]
fn marks_occur_in_the_names_and_probes_in_the_keys_of_their_parts() {
    for place in PIPELINES.iter().flat_map(|pipeline| pipeline.places()) {
        let model = (place.part.model.shapes)(&(place.part.published)()).unwrap();
        let names: Vec<String> = model.named_tensors().into_iter().map(|(name, _)| name).collect();
        assert!(names.iter().any(|name| name.starts_with(place.part.model.mark)), "{}", place.part.model.name);
        for section in place.part.sections {
            let checkpoint = CheckpointNaming { prefix: section.prefixes[0], naming: section.naming };
            // There is no file: `None`.
            let layout = model.layout(Some(checkpoint), None);
            assert_eq!(layout.prefix(), section.prefixes[0]);
            let keys = names.iter().flat_map(|name| layout.keys(name)).map(|key| key.key);
            assert!(keys.into_iter().any(|key| key == section.probe), "{}", section.probe);
        }
    }
}

#[test]
fn parts_of_a_pipeline_have_different_names_in_adapter_files() {
    for pipeline in PIPELINES {
        // The layers that can have adapters, for each part with adapters; without weights (`None`), the layers of the
        // published models. The key of a part's first layer stands for all keys of the part.
        let outlines = pipeline.outlines(None).unwrap();
        let keys = |style| {
            let key = |outline: &trainable_candle_io::adapter_file::Outline| {
                outline.names.key(outline.layers.keys().next().unwrap(), style)
            };
            outlines.iter().filter_map(key).collect::<std::collections::BTreeSet<_>>()
        };
        for style in [Style::Kohya, Style::Diffusers] {
            assert_eq!(keys(style).len(), outlines.len(), "{}", pipeline.name);
        }
    }
}

#[test]
fn the_error_for_an_unknown_pipeline_names_the_known_ones() {
    assert!(Pipeline::find("sdxx").unwrap_err().to_string().contains("expected \"sdxl\", \"flux\""));
}

/// An encoder that projects its pooled state counts as SDXL's second encoder if only its configuration is known. In a
/// known pipeline, the name of the encoder's folder decides.
#[test]
fn in_a_known_pipeline_the_folder_of_an_encoder_decides_its_part() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("projecting_pipeline");
    let folder = root.join("text_encoder");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden().join("text_encoder_2").join(file), folder.join(file)).unwrap();
    }
    // The prefixes in kohya's files: if the encoder is given as a part of the pipeline's folder, and if it is given by
    // its own folder.
    let kohya_prefixes = |index: &str| {
        std::fs::write(root.join("model_index.json"), index).unwrap();
        [(&root, Choice::of("text_encoder")), (&folder, Choice::default())].map(|(path, choice)| {
            Pretrained::find(path, CLIPTextModel::KIND, &choice).unwrap().place().unwrap().part.adapter.unwrap().kohya
        })
    };
    assert_eq!(kohya_prefixes(r#"{"_class_name": "StableDiffusionXLPipeline"}"#), ["lora_te1"; 2]);
    assert_eq!(kohya_prefixes(r#"{"_class_name": "SomethingElse"}"#), ["lora_te2"; 2]);
}
