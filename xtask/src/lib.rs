//! What the host's side of the lab (`xtask`) and its guest's side (`lab-init`) share.

pub mod lab_protocol;
