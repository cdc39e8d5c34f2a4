"""The console in a real browser: a key's whole life, and that no page is wider than a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from tests.broker import wait_until
from tests.proxy.conftest import Stack
from tests.proxy.person import PASSWORD, PEOPLE

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PAGES = ("", "/usage", "/queues", "/queue?name=browsed", "/keys", "/members")
ITEM = {"items": [{"queue": "browsed", "payload": {"hello": "world"}}]}

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@pytest.fixture(scope="module")
def base(stack: Stack) -> str:
    """The console's address by a name that a browser resolves to this machine by itself."""
    stack.proxy.stop()
    stack.proxy.start(PEOPLE)
    assert stack.push("browsed", 1).status == 201
    return f"http://acme-prod.localhost:{stack.proxy.port}"


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    """A browser, started once."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(base: str, driver: WebDriver) -> WebDriver:
    """The browser, signed in anew as the admin of acme."""
    driver.get(f"{base}/auth/login")
    driver.delete_all_cookies()
    driver.get(f"{base}/console/c/acme-prod/keys")
    assert "/auth/login" in driver.current_url
    driver.find_element(By.NAME, "email").send_keys("ops@acme.example")
    driver.find_element(By.NAME, "password").send_keys(PASSWORD)
    _click(driver, "Sign in")
    # A click returns before the form's answer is there.
    wait_until(lambda: driver.current_url == f"{base}/console/c/acme-prod/keys", 30, "the page asked for")
    return driver


def _click(driver: WebDriver, text: str) -> None:
    (button,) = (b for b in driver.find_elements(By.CSS_SELECTOR, "main button") if b.text.strip() == text)
    button.click()


def test_a_key_is_made_used_revoked_and_refused(stack: Stack, browser: WebDriver) -> None:
    browser.find_element(By.NAME, "name").send_keys("browser-key")
    _click(browser, "Make the key")
    key = wait_until(lambda: browser.find_elements(By.ID, "secret"), 30, "the new key")[0].text
    bearer = f"Bearer {key}"
    assert stack.request("POST", "/api/v1/push", ITEM, Authorization=bearer).status == 201
    # Reloading shows the page again: it neither makes a second key nor shows the first.
    browser.refresh()
    assert key not in browser.page_source
    rows = [row for row in browser.find_elements(By.CSS_SELECTOR, "tbody tr") if "browser-key" in row.text]
    assert len(rows) == 1
    rows[0].find_element(By.CSS_SELECTOR, "button").click()
    wait_until(lambda: "browser-key" in browser.switch_to.alert.text, what="the question whether to revoke")
    browser.switch_to.alert.accept()
    wait_until(lambda: "revoked" in browser.page_source, 30, "the key is shown as revoked")
    # The proxy hears of it by a notification.
    wait_until(lambda: stack.request("POST", "/api/v1/push", ITEM, Authorization=bearer).status == 401, 30, "401")
    refused = stack.request("POST", "/api/v1/push", ITEM, Authorization=bearer)
    assert refused.json()["error"] == "unknown or revoked api key"


def test_every_page_fits_and_breaks_no_rule_of_its_policy(base: str, browser: WebDriver) -> None:
    addresses = ["/", "/console/account", *(f"/console/c/acme-prod{page}" for page in PAGES)]
    for width in (390, 1280):
        metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 800}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        for address in addresses:
            browser.get(base + address)
            assert browser.find_elements(By.TAG_NAME, "h1"), address
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, address
    complaints = [entry["message"] for entry in browser.get_log("browser")]
    assert complaints == []


def test_signing_out_ends_the_session(base: str, browser: WebDriver) -> None:
    browser.find_element(By.CSS_SELECTOR, "details.menu summary").click()
    (out,) = (b for b in browser.find_elements(By.CSS_SELECTOR, ".menu button") if b.text == "Sign out")
    out.click()
    wait_until(lambda: browser.current_url == f"{base}/auth/login", 30, "the sign-in")
    browser.get(f"{base}/console")
    assert "/auth/login" in browser.current_url
