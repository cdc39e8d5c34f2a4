"""Whose request it is: from host and credential to a cluster and what may be done on it.

A cluster is named by the first label of the host, by the act-as header of a session, or, on a shared host, by the
credential. Who shows no good credential learns nothing about any of them.
"""

from __future__ import annotations

from queen.proxy.client import Client
from queen.proxy.clusters import Cluster
from queen.proxy.directory import Directory
from queen.proxy.principals import SCOPES, Nobody, People, Principal, Session
from queen.proxy.pxdb import Unavailable
from queen.proxy.refusals import cluster_unknown, forbidden, unauthorized
from queen.proxy.settings import ProxySettings, normal_host

_KEY_PREFIX = "qk_"
_NO_ROLE_THERE = "no such cluster, or no role on it"


class Identity:
    """Names the cluster and the principal of each request. ``people`` answers for sessions."""

    def __init__(self, settings: ProxySettings, directory: Directory | None, dev_cluster: Cluster | None) -> None:
        self.people: People = Nobody()
        self._insecure = settings.dev_insecure
        self._default = settings.default_cluster
        self._shared = settings.shared
        self._directory = directory
        self._dev_cluster = dev_cluster

    def identify(self, client: Client) -> tuple[Cluster, Principal]:
        """The request's cluster and principal; raises `Refusal` 401 or 403."""
        environ = client.environ
        act_as = environ.get("HTTP_X_QUEEN_ACT_CLUSTER", "").strip()
        host = normal_host(environ.get("HTTP_HOST", ""))
        if self._insecure:
            if act_as:
                raise forbidden("x-queen-act-cluster is not honoured with dev-insecure")
            return self._known(self._of_host(host)), Principal(scopes=SCOPES)
        credential = bearer(environ.get("HTTP_AUTHORIZATION", "")) or self.people.token(environ)
        if not credential:
            raise unauthorized("missing bearer credential")
        if credential.startswith(_KEY_PREFIX):
            return self._by_key(credential, host, act_as)
        return self._by_session(self.people.session(credential), host, act_as)

    def cluster_of(self, host: str) -> Cluster | None:
        """The cluster that a Host header names, the default one if it names none and there is one."""
        return self._of_host(normal_host(host))

    def resolve(self, reference: str) -> Cluster | None:
        """The cluster of a slug or an id, as the act-as header gives it."""
        if self._directory is None:
            return None
        try:
            return self._directory.by_id(reference) or self._directory.by_slug(reference.lower())
        except Unavailable:
            return None

    def _by_key(self, text: str, host: str, act_as: str) -> tuple[Cluster, Principal]:
        try:
            key = self._directory.key(text) if self._directory else None
        except Unavailable:
            key = None
        if key is None:
            raise unauthorized("unknown or revoked api key")
        if act_as:
            raise forbidden("api keys are bound to their own cluster; x-queen-act-cluster is not honoured for them")
        names_it = host in self._shared or _slug(host) == key.cluster.slug
        if not names_it and self._known(self._of_host(host)).id != key.cluster.id:
            raise forbidden("key/cluster mismatch")
        return key.cluster, Principal(scopes=key.scopes)

    def _by_session(self, session: Session, host: str, act_as: str) -> tuple[Cluster, Principal]:
        if act_as:
            return self._acting(session, act_as)
        if host in self._shared:
            if session.cluster is None:
                raise forbidden("this host serves several clusters; name one with x-queen-act-cluster")
            return self._acting(session, session.cluster)
        cluster = self._known(self._of_host(host))
        if session.cluster is not None and session.cluster not in (cluster.id, cluster.slug):
            raise forbidden("token not valid for this cluster")
        who = self._principal(session, cluster)
        if who is None:
            raise forbidden("no role on this cluster")
        return cluster, who

    def _acting(self, session: Session, reference: str) -> tuple[Cluster, Principal]:
        """One answer for a cluster that isn't there and for one the person has no part in."""
        cluster = self.resolve(reference)
        who = self._principal(session, cluster) if cluster else None
        if cluster is None or who is None:
            raise forbidden(_NO_ROLE_THERE)
        return cluster, who

    def _principal(self, session: Session, cluster: Cluster) -> Principal | None:
        if self.people.operator(session):
            return Principal(role="admin", operator=True)
        if session.cluster in (cluster.id, cluster.slug):
            return Principal(role=session.role)
        role = self.people.role(session, cluster)
        return Principal(role=role) if role else None

    def _of_host(self, host: str) -> Cluster | None:
        if self._dev_cluster is not None or self._directory is None:
            return self._dev_cluster
        try:
            slug = _slug(host)
            found = self._directory.by_slug(slug) if slug else None
            if found is None and self._default and host not in self._shared:
                found = self._directory.by_slug(self._default)
            return found
        except Unavailable:
            return None

    @staticmethod
    def _known(cluster: Cluster | None) -> Cluster:
        if cluster is None:
            raise cluster_unknown()
        return cluster


def bearer(header: str) -> str:
    """The credential in an Authorization header; the word Bearer may be left out."""
    text = header.strip()
    return text[7:].strip() if text[:7].lower() == "bearer " else text


def _slug(host: str) -> str:
    return host.partition(".")[0]
