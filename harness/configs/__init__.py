"""Configurations of other people's runs, side by side: what differs, and how often that key causes trouble.

``settings.yaml`` names the settings (one name over the keys of all frameworks) with the failures they cause;
``defaults.yaml`` the defaults by framework and version.
"""
