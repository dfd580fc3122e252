//! The `quantization` section of a config, as MLX writes it: affine groups, with exceptions by module.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::model::fields::Fields;

/// Bits and group of affine weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AffineParams {
    /// 4 or 8.
    pub bits: u32,
    /// Inputs per scale: 32, 64 or 128.
    pub group: usize,
}

/// How a checkpoint's weights are quantised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quantization {
    /// What holds where no override says otherwise.
    pub default: AffineParams,
    /// By the checkpoint's own module name (`model.embed_tokens`); `None` for modules left plain.
    pub overrides: BTreeMap<String, Option<AffineParams>>,
}

impl Quantization {
    /// Reads the section of a `config.json`: `quantization`, else a `quantization_config` without `quant_method`.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for values out of range, [`Error::Unsupported`] for other methods of quantisation.
    pub fn from_config(config: &Fields) -> Result<Option<Self>> {
        let section = match config.object("quantization")? {
            Some(section) => section,
            None => match config.object("quantization_config")? {
                Some(section) => section,
                None => return Ok(None),
            },
        };
        if let Some(method) = section.text("quant_method")?
            && method != "affine"
        {
            return Err(Error::Unsupported(format!(
                "config.json: weights quantised by \"{method}\"; this build reads MLX's affine groups (4 or 8 bits) and plain weights"
            )));
        }
        let default = params(&section, None)?;
        let mut overrides = BTreeMap::new();
        for (name, value) in section.iter() {
            match value {
                Value::Bool(false) => drop(overrides.insert(name.to_owned(), None)),
                Value::Bool(true) => drop(overrides.insert(name.to_owned(), Some(default))),
                Value::Object(_) => {
                    if let Some(inner) = section.object(name)? {
                        overrides.insert(name.to_owned(), Some(params(&inner, Some(default))?));
                    }
                }
                _ => {}
            }
        }
        Ok(Some(Self { default, overrides }))
    }

    /// What holds for a module of the checkpoint; `None` if it is left plain.
    #[must_use]
    pub fn of(&self, module: &str) -> Option<AffineParams> {
        self.overrides.get(module).copied().unwrap_or(Some(self.default))
    }
}

fn params(section: &Fields, default: Option<AffineParams>) -> Result<AffineParams> {
    if let Some(mode) = section.text("mode")?
        && mode != "affine"
    {
        return Err(Error::Unsupported(format!("config.json: quantisation mode \"{mode}\"; this build reads \"affine\"")));
    }
    let bits = match (section.size("bits", 64)?, default) {
        (Some(bits @ (4 | 8)), _) => bits as u32,
        (None, Some(default)) => default.bits,
        _ => return Err(section.wrong("bits", "4 or 8")),
    };
    let group = match (section.size("group_size", 1 << 20)?, default) {
        (Some(group @ (32 | 64 | 128)), _) => group,
        (None, Some(default)) => default.group,
        _ => return Err(section.wrong("group_size", "32, 64 or 128")),
    };
    Ok(AffineParams { bits, group })
}
