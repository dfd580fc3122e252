//! A turn for the page's events between calls that never wait: without one, a worker that computes hears of an abort only
//! when it is done.

use js_sys::Promise;
use wasm_bindgen::closure::Closure;
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;
use web_sys::MessageChannel;

/// Resolves as a new task of the event loop, behind the events that wait already. A message to oneself, because timers are
/// slowed to 4 ms and more when they follow one another.
pub(super) async fn let_events_in() {
    let Ok(channel) = MessageChannel::new() else { return };
    let turn = Promise::new(&mut |resolve, _| {
        let go_on = resolve.clone();
        let heard = Closure::once_into_js(move || {
            // A promise's own function cannot throw.
            let _ = go_on.call0(&JsValue::NULL);
        });
        channel.port1().set_onmessage(heard.dyn_ref());
        if channel.port2().post_message(&JsValue::NULL).is_err() {
            let _ = resolve.call0(&JsValue::NULL);
        }
    });
    // The promise is never rejected.
    let _ = JsFuture::from(turn).await;
    channel.port1().close();
}
