"""The address and interface that lead to another machine; tests/launch checks that gloo uses them."""

import socket

import pytest

from echelon.strategies.cluster.network import (
    address_towards,
    interface_of,
    is_this_machine,
    loopback_variables,
    variables_towards,
)


def test_loopback_is_an_interface_of_this_machine():
    names = {name for _, name in socket.if_nameindex()}
    assert set(loopback_variables().values()) <= names


def test_the_way_to_this_machine_is_loopback_and_needs_no_interface():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert is_this_machine("localhost")
    assert interface_of("127.0.0.1") is None
    assert variables_towards("127.0.0.1") == {}


def test_an_address_of_no_interface_has_none():
    assert interface_of("203.0.113.7") is None


def test_there_is_no_way_to_a_host_that_does_not_exist():
    with pytest.raises(OSError, match="not known|resolution"):
        address_towards("0.0.0.256")
