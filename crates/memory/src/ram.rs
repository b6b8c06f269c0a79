//! A guest's RAM: one or two regions (below and above the 32-bit MMIO gap) and their guest-physical view.
#![allow(unsafe_code)]

use std::sync::Arc;

use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::layer::Layer;
use crate::region::{MemoryError, PageUse, Region};

/// Guest RAM. Freezing handles *every* region, in two steps, so that nothing changes if the first fails.
#[derive(Debug)]
pub struct GuestRam {
    // Field order is drop order: the view goes before the mappings it points into. Devices hold clones of the view;
    // the VM drops them first.
    view: GuestMemoryMmap<()>,
    regions: Vec<(GuestAddress, Region)>,
}

impl GuestRam {
    /// Maps fresh memory at each guest-physical address and length.
    ///
    /// # Errors
    /// As [`Region::anonymous`]; [`MemoryError::Layout`] if they overlap.
    pub fn anonymous(layout: &[(GuestAddress, usize)], page_use: PageUse) -> Result<Self, MemoryError> {
        let mut regions = Vec::with_capacity(layout.len());
        for &(base, len) in layout {
            regions.push((base, Region::anonymous(len, page_use)?));
        }
        let mapped =
            regions.iter().map(|(base, region)| describe(*base, region)).collect::<Result<_, _>>()?;
        let view = GuestMemoryMmap::from_regions(mapped).map_err(MemoryError::Layout)?;
        Ok(Self { view, regions })
    }

    /// The guest-physical view for boot code and devices. It must not outlive this object.
    pub fn view(&self) -> &GuestMemoryMmap<()> {
        &self.view
    }

    /// The regions in order of guest-physical address.
    pub fn regions(&self) -> &[(GuestAddress, Region)] {
        &self.regions
    }

    /// Total size, bytes.
    pub fn len_bytes(&self) -> u64 {
        self.regions.iter().map(|(_, region)| region.len() as u64).sum()
    }

    /// Writes every region into a layer of its own, changing nothing. The vCPUs are stopped.
    ///
    /// # Errors
    /// As [`Region::to_layer`].
    pub fn to_layers(&self) -> Result<Vec<Layer>, MemoryError> {
        self.regions.iter().map(|(_, region)| region.to_layer("offshoot-ram")).collect()
    }

    /// Maps every region over its layer from [`GuestRam::to_layers`].
    ///
    /// # Errors
    /// As [`Region::adopt`]; regions mapped so far hold the same content as before.
    pub fn adopt(&mut self, layers: Vec<Layer>) -> Result<(), MemoryError> {
        for ((_, region), layer) in self.regions.iter_mut().zip(layers) {
            region.adopt(Arc::new(layer))?;
        }
        Ok(())
    }
}

fn describe(base: GuestAddress, region: &Region) -> Result<GuestRegionMmap<()>, MemoryError> {
    let describe_error = || MemoryError::Describe { len_bytes: region.len() };
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
    // SAFETY: the address and length are a live mapping with these flags, owned by `region`, which the `GuestRam`
    // keeps as long as the view; `adopt` replaces the mapping in place with one of the same size and protection.
    let mapping = unsafe { MmapRegion::build_raw(region.host_address().as_ptr(), region.len(), prot, flags) }
        .map_err(|_| describe_error())?;
    GuestRegionMmap::new(mapping, base).ok_or_else(describe_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestMemoryBackend};

    #[test]
    fn every_region_is_frozen() {
        let layout = [(GuestAddress(0), 4 << 20), (GuestAddress(1 << 32), 2 << 20)];
        let mut ram = GuestRam::anonymous(&layout, PageUse::Huge).unwrap();
        ram.view().write_obj(0x11u8, GuestAddress(4096)).unwrap();
        ram.view().write_obj(0x22u8, GuestAddress((1 << 32) + 5000)).unwrap();
        let layers = ram.to_layers().unwrap();
        assert_eq!(layers.iter().map(Layer::stored_bytes).collect::<Vec<_>>(), [4096, 4096]);
        ram.adopt(layers).unwrap();
        assert!(ram.regions().iter().all(|(_, region)| region.layer().is_some()));
        assert_eq!(ram.view().read_obj::<u8>(GuestAddress(4096)).unwrap(), 0x11);
        assert_eq!(ram.view().read_obj::<u8>(GuestAddress((1 << 32) + 5000)).unwrap(), 0x22);
        assert_eq!(ram.len_bytes(), 6 << 20);
        assert_eq!(ram.view().num_regions(), 2);
    }
}
