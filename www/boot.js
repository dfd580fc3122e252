// Says so where the page's program does not start: a browser without modules, a file that is not there, an error at the
// start. A script of its own, in words that every browser reads; app.js sets `forecallStarted` at its end.

(function () {
  function tell(why) {
    if (window.forecallStarted) return;
    document.getElementById('device-verdict').textContent = 'This page could not start';
    document.getElementById('device-verdict').setAttribute('data-state', 'bad');
    document.getElementById('model-size').textContent = '';
    var help = document.getElementById('device-help');
    help.textContent = why;
    help.removeAttribute('hidden');
  }

  if (!('noModule' in document.createElement('script'))) {
    tell('This browser is too old for it. Use a recent Chrome, Edge, Safari or Firefox.');
    return;
  }
  // Errors of scripts do not bubble, and the module's own imports have no element: both are seen from the window.
  window.addEventListener(
    'error',
    function (event) {
      var script = event.target && event.target.tagName === 'SCRIPT';
      if (script) tell('Its program could not be fetched from this server. Load the page again; if you serve it yourself, look whether the package was built (npm start builds it).');
      else if (event.message) tell('Its program stopped: ' + event.message + '. A recent Chrome, Edge, Safari or Firefox may run it.');
    },
    true
  );
})();
