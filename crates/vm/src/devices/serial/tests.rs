use std::io::{Read, Seek};
use std::sync::Arc;

use super::*;
use crate::devices::testing::{CountingIrqs, host};
use crate::devices::{Descriptors, testing};

const CAP: usize = 1 << 20;

fn attach(console: &mut SerialConsole, file: &std::fs::File) -> Arc<CountingIrqs> {
    let irqs = Arc::new(CountingIrqs::default());
    let mut descriptors = Descriptors { log: Some(file.try_clone().unwrap().into()), ..Default::default() };
    console.attach(&mut host(irqs.clone(), &mut descriptors)).unwrap();
    irqs
}

fn print(console: &mut SerialConsole, text: &[u8]) {
    for byte in text {
        console.write(0, &[*byte]);
    }
}

fn content(mut file: &std::fs::File) -> Vec<u8> {
    let mut data = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut data).unwrap();
    data
}

#[test]
fn output_reaches_the_log_line_by_line() {
    let file = tempfile::tempfile().unwrap();
    let mut console = SerialConsole::new();
    attach(&mut console, &file);
    print(&mut console, b"hello\nwor");
    assert_eq!(content(&file), b"hello\n");
    print(&mut console, b"ld\n");
    assert_eq!(content(&file), b"hello\nworld\n");
    print(&mut console, b"no end");
    console.flush();
    assert_eq!(content(&file), b"hello\nworld\nno end");
}

#[test]
fn log_keeps_its_end_within_twice_the_cap() {
    let file = tempfile::tempfile().unwrap();
    let mut console = SerialConsole::new();
    attach(&mut console, &file);
    let mut printed = Vec::new();
    while printed.len() < 5 * CAP {
        let line = format!("line {} of a guest that floods its console\n", printed.len());
        print(&mut console, line.as_bytes());
        printed.extend(line.as_bytes());
    }
    let data = content(&file);
    assert!(data.len() >= CAP && data.len() <= 2 * CAP, "{}", data.len());
    assert!(printed.ends_with(&data));
    assert_eq!(console.log().dropped_bytes(), (printed.len() - data.len()) as u64);
    assert_eq!(console.log().write_errors(), 0);
}

#[test]
fn log_goes_on_after_what_the_file_holds_even_when_opened_to_append() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    std::fs::write(&path, vec![b'x'; 2 * CAP]).unwrap();
    let file = std::fs::File::options().read(true).append(true).open(&path).unwrap();
    let mut console = SerialConsole::new();
    attach(&mut console, &file);
    print(&mut console, b"end\n");
    let data = content(&file);
    assert_eq!(data.len(), CAP);
    assert!(data.ends_with(b"xend\n"));
}

#[test]
fn log_that_cannot_be_written_never_stops_the_guest() {
    let mut console = SerialConsole::new();
    let full = std::fs::File::open("/dev/null").unwrap();
    attach(&mut console, &full);
    print(&mut console, b"lost\n");
    assert_eq!((console.log().dropped_bytes(), console.log().write_errors()), (5, 1));
    console.detach();
    print(&mut console, b"gone\n");
    assert_eq!(console.log().dropped_bytes(), 10);
}

#[test]
fn pipe_is_no_log() {
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let mut console = SerialConsole::new();
    let mut descriptors = Descriptors { log: Some(writer), ..Default::default() };
    let attached = console.attach(&mut host(Arc::default(), &mut descriptors));
    assert!(matches!(attached, Err(AttachError::Prepare { device: "serial", .. })));
    let attached = console.attach(&mut host(Arc::default(), &mut Descriptors::default()));
    assert!(matches!(attached, Err(AttachError::Missing { device: "serial", .. })));
}

/// Clones of a guest that was printing had a console that never spoke again: the transmit interrupt that its driver was
/// waiting for was lost with the old interrupt controller.
#[test]
fn pending_transmit_interrupt_is_raised_again_after_a_fork() {
    let parent_file = tempfile::tempfile().unwrap();
    let child_file = tempfile::tempfile().unwrap();
    let mut console = SerialConsole::new();
    let parent = attach(&mut console, &parent_file);
    console.write(1, &[TRANSMIT_ENABLED]);
    print(&mut console, b"be");
    assert!(parent.pulses() > 0);
    let before = parent.pulses();

    console.detach();
    let child = attach(&mut console, &child_file);
    assert_eq!((parent.pulses(), child.pulses()), (before, 1));
    print(&mut console, b"gun\n");
    assert_eq!((content(&parent_file), content(&child_file)), (vec![], b"begun\n".to_vec()));

    // Reading IIR acknowledges; nothing is pending then.
    let mut identification = [0];
    console.read(2, &mut identification);
    console.detach();
    assert_eq!(attach(&mut console, &child_file).pulses(), 0);
}

#[test]
fn odd_accesses_are_harmless() {
    let mut console = SerialConsole::new();
    let mut random = testing::XorShift::new(3);
    for _ in 0..10_000 {
        let mut data = [0; 4];
        let len = random.below(5) as usize;
        let offset = random.below(12);
        console.read(offset, &mut data[..len]);
        console.write(offset, &random.next().to_le_bytes()[..len]);
    }
    let mut data = [0; 2];
    console.read(0, &mut data);
    assert_eq!(data, [0xff; 2]);
}
