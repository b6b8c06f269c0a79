//! Bodies and queries that are exactly what was agreed, with errors in the API's own shape.

use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use offshoot_protocol::control::ErrorKind;
use serde::de::DeserializeOwned;

use super::MAX_BODY_BYTES;
use super::error::ApiError;

/// A JSON body. The types deny unknown fields.
pub(crate) struct Strict<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Strict<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect().await;
        let bytes = body.map_err(|error| {
            if error.downcast_ref::<LengthLimitError>().is_some() {
                let message = format!("the request body is longer than {MAX_BODY_BYTES} bytes");
                ApiError::new(ErrorKind::Caller, "body_too_long", message)
            } else {
                ApiError::new(
                    ErrorKind::Caller,
                    "body_broken",
                    format!("the request body broke off: {error}"),
                )
            }
        })?;
        serde_json::from_slice(&bytes.to_bytes()).map(Self).map_err(|error| {
            ApiError::new(ErrorKind::Caller, "bad_json", format!("the request body is wrong: {error}"))
                .hint("docs/api.md lists each call's fields")
        })
    }
}

/// A query string. The types deny unknown fields.
pub(crate) struct StrictQuery<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for StrictQuery<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let query = Query::try_from_uri(&parts.uri);
        query.map(|Query(value)| Self(value)).map_err(|error| {
            use std::error::Error;
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            ApiError::new(ErrorKind::Caller, "bad_query", format!("the query string is wrong: {why}"))
        })
    }
}
