//! Errors as answers: the one place where kinds become HTTP statuses.

use axum::Json;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use offshoot_host::Report;
use offshoot_protocol::control::ErrorKind;

/// An error answer.
#[derive(Debug)]
pub(crate) struct ApiError(Report);

impl ApiError {
    /// An error of the API itself.
    pub(crate) fn new(kind: ErrorKind, code: &str, message: String) -> Self {
        Self(Report { code: code.to_owned(), kind, message, hint: None })
    }

    pub(crate) fn hint(mut self, hint: &str) -> Self {
        self.0.hint = Some(hint.to_owned());
        self
    }

    /// A handler panicked.
    pub(crate) fn bug(panic: &tokio::task::JoinError) -> Self {
        Self::new(ErrorKind::Bug, "internal", format!("the daemon failed: {panic}"))
            .hint("the daemon's log says where; please report it")
    }
}

impl From<Report> for ApiError {
    fn from(report: Report) -> Self {
        Self(report)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = status(&self.0);
        log(&self.0);
        (status, Json(self.0)).into_response()
    }
}

/// Writes an error to the log: what is the host's or ours as a warning.
pub(crate) fn log(report: &Report) {
    let Report { code, message, .. } = report;
    match report.kind {
        ErrorKind::Bug => tracing::error!(code, "{message}"),
        ErrorKind::Host | ErrorKind::Corrupt | ErrorKind::Unsupported => tracing::warn!(code, "{message}"),
        ErrorKind::Caller | ErrorKind::State => tracing::info!(code, "{message}"),
    }
}

/// The HTTP status of an error.
pub(crate) fn status(report: &Report) -> StatusCode {
    let code = report.code.as_str();
    match report.kind {
        ErrorKind::Caller if code == "method_not_allowed" => StatusCode::METHOD_NOT_ALLOWED,
        ErrorKind::Caller if code == "body_too_long" => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorKind::Caller if code.ends_with("_not_found") => StatusCode::NOT_FOUND,
        ErrorKind::Caller if code.ends_with("_exists") || code.ends_with("_in_use") => StatusCode::CONFLICT,
        ErrorKind::Caller => StatusCode::BAD_REQUEST,
        ErrorKind::State if code.starts_with("guest_connection_") => StatusCode::BAD_GATEWAY,
        ErrorKind::State => StatusCode::CONFLICT,
        ErrorKind::Corrupt => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorKind::Host if matches!(code, "out_of_space" | "out_of_memory") => {
            StatusCode::INSUFFICIENT_STORAGE
        }
        ErrorKind::Host => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Bug => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

pub(crate) async fn no_route(uri: Uri) -> ApiError {
    ApiError::new(ErrorKind::Caller, "route_not_found", format!("there is no {}", uri.path()))
        .hint("docs/api.md lists the calls under /offshoot/v1")
}

pub(crate) async fn no_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::new(ErrorKind::Caller, "method_not_allowed", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_follow_kind_and_code() {
        let of = |kind, code: &str| {
            status(&Report { code: code.into(), kind, message: String::new(), hint: None }).as_u16()
        };
        assert_eq!(of(ErrorKind::Caller, "bad_json"), 400);
        assert_eq!(of(ErrorKind::Caller, "template_not_found"), 404);
        assert_eq!(of(ErrorKind::Caller, "template_in_use"), 409);
        assert_eq!(of(ErrorKind::State, "sandbox_not_running"), 409);
        assert_eq!(of(ErrorKind::State, "guest_connection_closed"), 502);
        assert_eq!(of(ErrorKind::Corrupt, "image_corrupt"), 422);
        assert_eq!(of(ErrorKind::Unsupported, "vmm_refused"), 501);
        assert_eq!(of(ErrorKind::Host, "out_of_space"), 507);
        assert_eq!(of(ErrorKind::Host, "vmm_timeout"), 503);
        assert_eq!(of(ErrorKind::Bug, "internal"), 500);
    }
}
